"""Commands for a trained model and its card: `predict`, `export`, `release`, `report` and those of `card`."""

import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from flows.cli.running import SETTINGS, AllowCode, in_checkout, say
from tasks.runs.checkout import find_checkout, require_pulled

card_app = typer.Typer(**SETTINGS, help="Verify, print or export a privacy card.")

CARD = Path("artifacts/privacy_card.json")

Model = Annotated[
    Path, typer.Option("--model", help="A model.safetensors, or a folder with one, such as a release.")
]
ARTIFACTS = Path("artifacts")


def _file_of_run(path: Path, name: str = "model.safetensors") -> Path:
    """The path of `in_checkout`, of a file or of the folder that contains `name`; refused where DVC may bring it."""
    path = in_checkout(path)
    require_pulled(path if path.suffix else path / name)
    return path


def _allowed_code(allow_code: list[str] | None) -> set[str]:
    """The code of the user's own that a model may name: as given, and what the checkout names."""
    from tasks.config.own_code import named_code

    return {*(allow_code or ()), *named_code(find_checkout() or Path())}


def predict(
    file: Annotated[
        Path,
        typer.Argument(
            help="CSV, Parquet, an image or a folder of images, texts, or features as .npy; - for standard input."
        ),
    ],
    model: Model = ARTIFACTS,
    to: Annotated[
        Path | None, typer.Option(help="Where to write, .csv or .parquet.", show_default="the terminal")
    ] = None,
    keep: Annotated[
        list[str] | None,
        typer.Option(help="A column of the table to write beside the predictions; may be repeated."),
    ] = None,
    threshold: Annotated[
        float | None,
        typer.Option(
            help="Of two classes, predict the second where its probability exceeds this.", show_default="0.5"
        ),
    ] = None,
    allow_code: AllowCode = None,
) -> None:
    """Predict new records, which are prepared as the model's training records were."""
    from data.card import DataRefusedError
    from tasks.kept_columns import spool_to_file

    if str(file) == "-":
        with spool_to_file(sys.stdin.buffer) as copy:
            return _predict(copy, model, to, keep or [], allow_code, threshold)
    if to is not None and to.exists() and to.samefile(file):
        raise DataRefusedError(
            "{path} holds the records to predict on; write the predictions to another file.",
            code="bad_output",
            path=to,
        )
    _predict(file, model, to, keep or [], allow_code, threshold)


def _predict(
    file: Path,
    model: Path,
    to: Path | None,
    keep: list[str],
    allow_code: list[str] | None,
    threshold: float | None,
) -> None:
    from algorithms.models.saved import load
    from algorithms.privacy.card import load_beside
    from algorithms.privacy.card.text import statement
    from data.card import DataRefusedError
    from data.preparation import reader_in
    from tasks.export import NO_CARD
    from tasks.kept_columns import with_columns
    from tasks.predict import predict as predictions
    from tasks.predict import write

    allowed = _allowed_code(allow_code)
    model = _file_of_run(model)
    trained, count = load(model, allow_code=allowed), 0
    card = load_beside(model)
    privacy = NO_CARD if card is None else statement(card)
    if card is not None and not card.setting.private:  # CSV has no place for the sentence
        typer.echo(privacy, err=True)
    batches = predictions(trained, file, allow_code=allowed, threshold=threshold)
    if keep:
        batches = with_columns(batches, file, reader_in(trained.preparation), keep)
    for count in write(batches, trained.classes, to or sys.stdout, privacy):
        if to is not None and sys.stderr.isatty():
            typer.echo(f"{count:,} records\r", nl=False, err=True)
    if not count:
        raise DataRefusedError(
            "{path} holds no records, so nothing was written; a table has them below a line of its columns' names.",
            code="no_records",
            path=file,
        )
    if to is not None:
        say(f"Wrote {count:,} prediction{'' if count == 1 else 's'} to {to}.")


def export(
    form: Annotated[str, typer.Option("--to", help="onnx, torchscript, huggingface or library.")],
    output: Annotated[
        Path | None,
        typer.Option(
            help="What to write.", show_default="model.onnx, model.pt, or a folder named after the format"
        ),
    ] = None,
    model: Model = ARTIFACTS,
    allow_code: AllowCode = None,
) -> None:
    """Export the model to another format, load it again and compare its predictions on synthetic records."""
    from tasks.config.params import ParamsRefusedError
    from tasks.export import FORMS
    from tasks.export import export as write

    if form not in FORMS:
        raise ParamsRefusedError(
            "there is no format {form!r}; choose {choices}.",
            code="bad_option",
            form=form,
            choices=", ".join(FORMS),
            options=("--format",),
        )
    target = output or Path({"onnx": "model.onnx", "torchscript": "model.pt"}.get(form, form))
    allowed = _allowed_code(allow_code)
    far = write(_file_of_run(model), form, target, allow_code=allowed)
    say(f"Wrote {target}. Its scores differ from the model's by at most {far:.1g}.")


def release(
    folder: Annotated[Path, typer.Argument(help="Folder to create.")],
    model: Annotated[Path, typer.Option("--model", help="Folder of the run.")] = ARTIFACTS,
    allow_code: AllowCode = None,
) -> None:
    """Create a folder to publish: the model, its signed card, the files that verify it, a model card."""
    from data.files import public_key
    from tasks.config import home
    from tasks.export import release as make

    allowed = _allowed_code(allow_code)
    names = make(_file_of_run(model), folder, key=public_key(home()), allow_code=allowed)
    say(f"Wrote {folder}: {', '.join(names)}. Others can verify it with `epsilonflow card verify`.")


def report(
    audience: Annotated[
        str, typer.Option("--for", help="authority: questions of NIST, the EDPB and the AI Act.")
    ],
    output: Annotated[Path, typer.Option(help="The HTML page to write.")] = Path("authority.html"),
    model: Annotated[Path, typer.Option("--model", help="Folder of the run.")] = ARTIFACTS,
) -> None:
    """Write a page with the questions of authorities, and the facts of the run that answer them."""
    from algorithms.errors import RefusedError
    from algorithms.privacy.card import load
    from data.files import write_text
    from tasks.authority import page

    if audience != "authority":
        raise RefusedError(
            "there is no page for {audience!r}; choose authority.",
            code="bad_option",
            audience=audience,
            options=("--for",),
        )
    folder = _file_of_run(model, "privacy_card.json")
    write_text(output, page(load(folder / "privacy_card.json"), folder, find_checkout() or Path()))
    say(f"Wrote {output}. It prints as PDF from a browser.")


@card_app.command()
def verify(
    file: Annotated[Path, typer.Argument(help="A privacy_card.json, with its files next to it.")] = CARD,
    key: Annotated[
        str | None,
        typer.Option(
            help="The owner's public key, or its file.", show_default="owner.pub of this data folder"
        ),
    ] = None,
    unsigned: Annotated[bool, typer.Option("--unsigned", help="Accept a card without a signature.")] = False,
) -> None:
    """Check a card's signature, recompute its epsilon from its events and compare the files next to it.

    Exit status 1 if any check fails.
    """
    from algorithms.errors import RefusedError
    from algorithms.privacy import card
    from data.files import public_key
    from tasks.config import home

    if key is not None and Path(key).is_file():
        key = Path(key).read_text(encoding="utf-8", errors="replace").strip()
    if key is not None and not re.fullmatch("[0-9a-f]{64}", key):
        raise RefusedError(
            "--key is no public key; give the 64 hexadecimal digits of an owner.pub, or its path.",
            code="bad_option",
            options=("--key",),
        )
    file = _file_of_run(file)
    verification = card.verify(card.load(file), file.parent, key=key or public_key(home()), unsigned=unsigned)
    words = {True: "holds", False: "FAILS", None: "not checked"}
    for check in verification.checks:
        option = " by --key" if check.name == "owner" and check.passed is None else ""
        say(f"{words[check.passed]}: {check.name} ({check.detail}{option})")
    if not verification.passed:
        raise typer.Exit(1)


@card_app.command("export")
def export_card(
    file: Annotated[Path, typer.Argument(help="A privacy_card.json.")] = CARD,
    form: Annotated[
        str, typer.Option("--to", help="registry: the OpenDP registry of deployments.")
    ] = "registry",
    output: Annotated[Path, typer.Option(help="The file to write.")] = Path("registry.yaml"),
) -> None:
    """Write a card in the form of others: an entry of the registry of deployments of differential privacy.

    What the card cannot know comes from the section `deployment` of the data card.
    """
    from algorithms.errors import RefusedError
    from algorithms.privacy.card import load
    from data.card import CARDS, data_card
    from tasks.registry import as_yaml, registry_entry

    if form != "registry":
        raise RefusedError(
            "there is no form {form!r}; choose registry.", code="bad_option", form=form, options=("--form",)
        )
    if output.exists():
        raise RefusedError(
            "{path} is there already; name another place, or move it away.", code="bad_output", path=output
        )
    card, cards = load(_file_of_run(file)), (find_checkout() or Path()) / "data/cards"
    name = card.setting.dataset
    data = data_card(name, cards if (cards / f"{name}.yaml").is_file() else CARDS)
    output.write_text(as_yaml(registry_entry(card, data)), encoding="utf-8")
    say(f"Wrote {output}.")


@card_app.command("show")
def show_card(file: Annotated[Path, typer.Argument(help="A privacy_card.json.")] = CARD) -> None:
    """Print a card as text, without verifying it."""
    from algorithms.privacy.card import load
    from algorithms.privacy.card.text import markdown

    say(markdown(load(_file_of_run(file)), escape=str))

"""Commands for setting up a project: `init`, `doctor` and `data check`."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.cli.terminal import SETTINGS, say, sentences

if TYPE_CHECKING:
    from tasks.config.new_project import Declared

data_app = typer.Typer(**SETTINGS, help="Check a data card and its files.")


@data_app.callback()
def data_main() -> None:
    """Check a data card and its files."""


@data_app.command("check")
def check_data(
    card: Annotated[str, typer.Argument(help="Name of a data set, or the path of its card.")],
    counts: Annotated[
        bool, typer.Option("--counts", help="Show counts for private records; for the owner only.")
    ] = False,
) -> None:
    """Check a data card, the checksums of its files, and that every record can be read. Spends nothing.

    Shows how many values would be clamped, replaced or refused: always for public records, with --counts for private
    ones. These counts are exact and protect nobody, so keep them to yourself.
    """
    with sentences():
        from data.card import DataRefusedError
        from tasks.check_data import look

        found = look(card, Path.cwd(), counted=counts)
        for path, line in found.checksums.items():
            say(f"{path}: if this is the right file, its card needs  {line}")
        if found.counts is not None:
            for problem, count in found.counts.items():
                say(f"{count:>12,}  {problem}")
        if found.refused is not None:
            raise DataRefusedError(found.refused)
        kind = "public" if found.card.public else "private"
        said = (
            "is valid; its blocks are read when it is used"
            if found.card.blocks
            else "can be read as its card declares"
        )
        say(f"The {kind} data set {found.card.name} {said}.")
        if not found.card.public and not counts and found.card.blocks is None:
            say("Use --counts to see how many values would be clamped, replaced or refused.")


def doctor() -> None:
    """Check this machine and checkout, and say what is wrong. Exit status 1 if anything is."""
    from flows.cli.doctor import findings

    is_ill = False
    for found in findings(Path.cwd()):
        mark = {True: "ok   ", False: "WRONG", None: "-    "}[found.is_well]
        say(f"{mark}  {found.name}: {found.text}")
        is_ill |= found.is_well is False
    if is_ill:
        raise typer.Exit(1)


_OPTIONS = {
    "a table": ("from", "label"),
    "images": ("classes", "size", "encoder"),
    "texts": ("label", "classes", "bounds", "tags", "next-token", "encoder"),
}
"""What `init` takes for each kind of records, beside what it takes for all."""


def init(
    folder: Annotated[Path, typer.Argument(help="Folder to create.")],
    schema: Annotated[
        Path | None,
        typer.Option(
            "--from", help="A Frictionless table schema (JSON). Without it you are asked for the columns."
        ),
    ] = None,
    file: Annotated[
        Path | None, typer.Option(help="The table, CSV or Parquet. It is copied; no row is read.")
    ] = None,
    label: Annotated[
        str,
        typer.Option(
            help="Column of the class or number to predict; several columns, separated by commas, are a label each."
        ),
    ] = "",
    at_most: Annotated[int | None, typer.Option(min=1, help="Upper bound on the number of records.")] = None,
    unit: Annotated[
        str | None,
        typer.Option(help="What one record is, and so what is protected.", show_default="one person"),
    ] = None,
    cap: Annotated[
        float | None, typer.Option(help="Epsilon that all runs together may spend.", show_default="10")
    ] = None,
    images: Annotated[
        Path | None,
        typer.Option(
            help="Instead of a table: a folder with one subfolder of images per class. It is copied."
        ),
    ] = None,
    size: Annotated[
        int | None,
        typer.Option(
            min=8, help="Side in pixels to which images are cropped and resized.", show_default="64"
        ),
    ] = None,
    texts: Annotated[
        Path | None,
        typer.Option(
            help="Instead of a table: rows of texts, CSV, JSON lines or Parquet. It is copied; no row is read."
        ),
    ] = None,
    columns: Annotated[str, typer.Option(help="Columns of the texts, separated by commas.")] = "text",
    classes: Annotated[str, typer.Option(help="Classes of images or texts, separated by commas.")] = "",
    bounds: Annotated[
        str, typer.Option(help="Predict a number from texts, between LOW,HIGH, instead of classes.")
    ] = "",
    tags: Annotated[
        str, typer.Option(help="Predict a tag for each word of a text, instead of classes: O,B-PER,I-PER.")
    ] = "",
    next_token: Annotated[
        bool, typer.Option("--next-token", help="Predict the next token of texts, instead of classes.")
    ] = False,
    encoder: Annotated[
        str | None, typer.Option(help="A public encoder, or tokenizer/NAME of a model of texts to fine-tune.")
    ] = None,
) -> None:
    """Create a project for your own data, under git and DVC.

    It contains params.yaml, dvc.yaml, prefect.yaml and a data card of what you declare.
    """
    with sentences():
        from flows.cli.asking import columns_asked, listed, number_asked, two_numbers
        from tasks.config.new_project import (
            Declared,
            absolute,
            check,
            make,
            of_images,
            of_schema,
            of_texts,
            predicted,
            table_of,
        )
        from tasks.config.params import ParamsRefusedError

        options = {
            "from": schema,
            "label": label,
            "size": size,
            "classes": classes,
            "bounds": bounds,
            "tags": tags,
        }
        options |= {"next-token": next_token, "encoder": encoder}
        kind = "images" if images is not None else "texts" if texts is not None else "a table"
        odd = [name for name, value in options.items() if value and name not in _OPTIONS[kind]]
        if odd:
            raise ParamsRefusedError(
                f"--{odd[0]} is not for {kind}, which takes --{', --'.join(_OPTIONS[kind])}; leave it out."
            )
        paths = [path for path in (file, images, texts) if path is not None]
        check(folder, paths, is_table=file is not None)  # before anybody is asked for columns
        name = re.sub(r"[^a-z0-9_-]+", "-", folder.resolve().name.lower()).strip("-_") or "table"
        own: dict[str, Any] = {
            "unit": "one person" if unit is None else unit,
            "cap": 10.0 if cap is None else cap,
        }
        seen = None if encoder is None else absolute(encoder)
        if encoder is not None:
            from algorithms.encoders import check_name

            check_name(encoder)
        if images is not None:
            most = at_most or number_asked()
            declared = of_images(name, images, listed(classes), most, size or 64, encoder=seen, **own)
        elif texts is not None:
            most, named = at_most or number_asked(), listed(columns)
            held = listed(label) or ([] if next_token else ["tags" if tags else "label"])
            told = predicted(
                classes=listed(classes),
                labels=held if len(held) > 1 else [],
                bounds=two_numbers(bounds),
                tags=listed(tags),
                next_token=next_token,
            )
            declared = of_texts(name, texts, named, held, told, most, encoder=seen, **own)
        else:
            if schema is not None:
                found, told = of_schema(schema, listed(label))
            else:
                found, values = columns_asked()
                told = predicted(classes=values)
            most = at_most or number_asked()
            declared = Declared(name, table_of(found, file), told, most, file=file, **own)
        make(folder, declared)
    given = {"cap": cap, "unit": unit, "size": size}
    _say_next(folder, declared, [key for key, value in given.items() if value is not None])


def _say_next(folder: Path, declared: "Declared", given: list[str]) -> None:
    """Print the assumed defaults, except those in `given`, and the next commands."""
    name = declared.name
    say(
        f"Created {folder} with these defaults; to change them, edit its data/cards/{name}.yaml before the first run:"
    )
    for words in declared.assumed(*given):
        say(f"  {words}")
    say(f"params.yaml has epsilon 1, delta {declared.delta:g} and suitable settings. Next, in {folder}:")
    if declared.file is None:
        say(f"  put the table at datasets/raw/{name}.csv; `data check` prints the checksum for the card")
    say(f"  epsilonflow data check {name}\n  epsilonflow plan\n  epsilonflow run")
    say(f'  git add --all && git commit --message "{name}"  # before `dvc exp run` or `dvc metrics diff`')

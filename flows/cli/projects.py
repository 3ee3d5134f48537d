"""Commands for setting up a project: `init`, `doctor` and `data check`."""

import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from netrc import NetrcParseError, netrc
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal
from urllib.parse import urlsplit

import typer

from flows.cli.answers import parse_bounds, parse_whole_number, split_list
from flows.cli.interview import Interview
from flows.cli.running import SETTINGS, prefect_api_url, say, takes_options
from flows.cli.table_questions import ask_for_columns, ask_for_person
from tasks.runs.checkout import find_checkout, missing_in

if TYPE_CHECKING:
    from data.documents import Document
    from tasks.config.new_project import Declared

_FREE_GB = 5.0

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

    Says in words what more than a hundredth of the values undergo, and what else looks wrong.

    Shows how many values would be clamped, replaced or refused: of private records with --counts alone.

    All this depends on the records and protects nobody, so keep it to yourself.
    """
    from tasks.check_data import check_data

    report = check_data(card, find_checkout() or Path.cwd(), counted=counts)
    for path, line in report.checksums.items():
        say(f"{path}: if this is the right file, its card needs  {line}")
    if report.counts is not None:
        for problem, count in report.counts.items():
            say(f"{count:>12,}  {problem}")
    if report.warning is not None:
        say(report.warning)
    for remark in report.remarks:
        say(f"look at this: {remark}")
    if report.refused is not None:
        raise report.refused
    kind = "public" if report.card.public else "private"
    blocks = ", in all blocks that are there" if report.card.blocks else ""
    say(f"The {kind} data set {report.card.name} can be read as its card declares{blocks}.")
    if not report.card.public and not counts:
        say("Use --counts to see how many values would be clamped, replaced or refused.")


_OPTIONS = {
    "a table": ("from", "label", "counts", "quantile"),
    "images": ("classes", "size", "encoder"),
    "texts": ("label", "classes", "bounds", "counts", "quantile", "tags", "next-token", "encoder"),
}
"""What `init` takes for each kind of records, beside what it takes for all."""


@dataclass(frozen=True)
class _Options:
    """What `init` was called with; None and empty for what was left out."""

    folder: Annotated[Path, typer.Argument(help="Folder to create.")]
    schema: Annotated[
        Path | None,
        typer.Option(
            "--from", help="A Frictionless table schema (JSON). Without it you are asked for the columns."
        ),
    ] = None
    file: Annotated[
        Path | None, typer.Option(help="The table, CSV or Parquet. It is copied; no row is read.")
    ] = None
    label: Annotated[
        str,
        typer.Option(
            help="Column of the class or number to predict; several columns, separated by commas, are a label each."
        ),
    ] = ""
    at_most: Annotated[int | None, typer.Option(min=1, help="Upper bound on the number of records.")] = None
    unit: Annotated[
        str | None,
        typer.Option(help="What one record is, and so what is protected.", show_default="one person"),
    ] = None
    cap: Annotated[
        float | None, typer.Option(help="Epsilon that all runs together may spend.", show_default="10")
    ] = None
    runs: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="How many runs are planned on these people; many cost less than the sum of their epsilons.",
            show_default="1",
        ),
    ] = None
    images: Annotated[
        Path | None,
        typer.Option(
            help="Instead of a table: a folder with one subfolder of images per class. It is copied."
        ),
    ] = None
    size: Annotated[
        int | None,
        typer.Option(
            min=8, help="Side in pixels to which images are cropped and resized.", show_default="64"
        ),
    ] = None
    texts: Annotated[
        Path | None,
        typer.Option(
            help="Instead of a table: rows of texts, CSV, JSON lines or Parquet. It is copied; no row is read."
        ),
    ] = None
    person: Annotated[
        str | None,
        typer.Option(help="Column of the person's id, if a person may have several rows; it is no feature."),
    ] = None
    per_person: Annotated[
        int | None,
        typer.Option(min=1, help="How many rows of each person are used at most.", show_default="1"),
    ] = None
    columns: Annotated[str, typer.Option(help="Columns of the texts, separated by commas.")] = "text"
    classes: Annotated[str, typer.Option(help="Classes of images or texts, separated by commas.")] = ""
    bounds: Annotated[
        str, typer.Option(help="Predict a number from texts, between LOW,HIGH, instead of classes.")
    ] = ""
    counts: Annotated[
        bool,
        typer.Option("--counts", help="The number to predict is a count: its mean, by the Poisson loss."),
    ] = False
    quantile: Annotated[
        float | None, typer.Option(help="Predict this quantile of the number, such as 0.9, not its mean.")
    ] = None
    tags: Annotated[
        str, typer.Option(help="Predict a tag for each word of a text, instead of classes: O,B-PER,I-PER.")
    ] = ""
    next_token: Annotated[
        bool, typer.Option("--next-token", help="Predict the next token of texts, instead of classes.")
    ] = False
    encoder: Annotated[
        str | None, typer.Option(help="A public encoder, or tokenizer/NAME of a model of texts to fine-tune.")
    ] = None
    holdout: Annotated[
        Literal["private", "public"],
        typer.Option(
            help="Whether the records that test a model are as private as the others, or public, with --why."
        ),
    ] = "private"
    why: Annotated[str | None, typer.Option(help="Why held-out records are public, in a sentence.")] = None

    @property
    def kind(self) -> str:
        """The kind of records."""
        return "images" if self.images is not None else "texts" if self.texts is not None else "a table"

    @property
    def paths(self) -> list[Path]:
        """The file or folder of records, if there is one."""
        return [path for path in (self.file, self.images, self.texts) if path is not None]

    @property
    def for_all_kinds(self) -> "Document":
        """What is declared of records of each kind."""
        return {
            "unit": "one person" if self.unit is None else self.unit,
            "cap": 10.0 if self.cap is None else self.cap,
            "runs": self.runs or 1,
            "public_why": self.why,
        }

    def check(self) -> None:
        """Raise ParamsRefusedError for options that do not fit together."""
        from tasks.config.new_project import check_statistic
        from tasks.config.params import ParamsRefusedError

        of_one_kind = {
            "from": self.schema,
            "label": self.label,
            "size": self.size,
            "classes": self.classes,
            "bounds": self.bounds,
            "counts": self.counts,
            "quantile": self.quantile,
            "tags": self.tags,
            "next-token": self.next_token,
            "encoder": self.encoder,
        }
        fitting = _OPTIONS[self.kind]
        odd = [name for name, value in of_one_kind.items() if value and name not in fitting]
        if odd:
            raise ParamsRefusedError(
                "--{name} is not for {kind}, which takes --{fitting}; leave it out.",
                code="bad_option",
                name=odd[0],
                kind=self.kind,
                fitting=", --".join(fitting),
                options=(f"--{odd[0]}",),
            )
        if self.images is not None and self.person is not None:
            raise ParamsRefusedError(
                "--person is for tables and texts, whose rows name a person; leave it out.",
                code="bad_option",
                options=("--person",),
            )
        if (self.why is not None) != (self.holdout == "public"):
            raise ParamsRefusedError(
                "held-out records of a private data set are public only for a reason, which the data card, reports and"
                " privacy cards state; give both --holdout public and --why 'one sentence', or neither.",
                code="bad_option",
                options=("--holdout", "--why"),
            )
        if self.per_person is not None and self.person is None:
            raise ParamsRefusedError(
                "--per-person needs the column of the person's id; name it by --person.",
                code="bad_option",
                options=("--per-person", "--person"),
            )
        check_statistic(counts=self.counts, quantile=self.quantile)


@takes_options(_Options)
def init(options: _Options) -> None:
    """Create a project for your own data, under git and DVC.

    It contains params.yaml, dvc.yaml, prefect.yaml and a data card of what you declare, nothing read from rows.

    Of a table it says what `data check` does, since that is for its owner alone.
    """
    from tasks.config import new_project as project

    options.check()
    folder = options.folder
    # Checked before anybody is asked for columns.
    project.check(folder, options.paths, is_table=options.file is not None)
    if options.encoder is not None:
        from algorithms.encoders import check_name

        check_name(options.encoder)
    path = folder.resolve()
    name = re.sub(r"[^a-z0-9_-]+", "-", path.name.lower()).strip("-_") or "table"
    talk = Interview()
    with talk.keep_answers(path.with_name(f"{path.name}.answers.json")):
        declared = talk.hold(lambda talk: _declare(talk, name, options))
        project.make(folder, declared)
    stated = [key for key in ("cap", "runs", "unit", "size", "person") if getattr(options, key) is not None]
    if options.file is not None:
        _say_remarks(path, name)
    _say_next(folder, declared, stated)


def _say_remarks(folder: Path, name: str) -> None:
    """Print what `data check` finds in the rows of a new project's table; nobody but the owner is told."""
    from tasks.check_data import check_data

    if (folder / "data" / "cards" / f"{name}.yaml").is_file():
        report = check_data(name, folder, counted=False)
        for remark in report.remarks:
            say(f"look at this: {remark}")
        if report.refused is not None:
            say(f"before a run: {report.refused}")


def _declare(talk: Interview, name: str, options: _Options) -> "Declared":
    """What is declared of the records: by the options and, where they leave something open, by answers."""
    from tasks.config.new_project import absolute

    encoder = None if options.encoder is None else absolute(options.encoder)
    if options.images is not None:
        return _declare_images(talk, name, options.images, options, encoder)
    if options.texts is not None:
        return _declare_texts(talk, name, options.texts, options, encoder)
    return _declare_table(talk, name, options)


def _declare_images(
    talk: Interview, name: str, folder: Path, options: _Options, encoder: str | None
) -> "Declared":
    from tasks.config.new_project import of_images

    max_records = options.at_most or _ask_for_number(talk)
    classes, size = split_list(options.classes), options.size or 64
    return of_images(name, folder, classes, max_records, size, encoder=encoder, **options.for_all_kinds)


def _declare_texts(
    talk: Interview, name: str, file: Path, options: _Options, encoder: str | None
) -> "Declared":
    from tasks.config import new_project as project

    header = project.header_of(file)
    max_records, columns = options.at_most or _ask_for_number(talk), split_list(options.columns)
    usual_label = [] if options.next_token else ["tags" if options.tags else "label"]
    labels = _labels(options) or usual_label
    target = project.target_keys(
        classes=split_list(options.classes),
        labels=labels if len(labels) > 1 else [],
        bounds=parse_bounds(options.bounds) if options.bounds else (),
        tags=split_list(options.tags),
        next_token=options.next_token,
    )
    target = project.of_number(target, counts=options.counts, quantile=options.quantile)
    person = _person_of(talk, options, header, [*columns, *labels])
    return project.of_texts(
        name, file, columns, labels, target, max_records, encoder=encoder, **options.for_all_kinds, **person
    )


def _labels(options: _Options) -> list[str]:
    """The columns that --label names; raises ParamsRefusedError for one that it names twice."""
    from tasks.config.params import ParamsRefusedError

    labels = split_list(options.label)
    repeated = [name for position, name in enumerate(labels) if name in labels[:position]]
    if repeated:
        raise ParamsRefusedError(
            "--label names {column!r} twice; name each column once.",
            code="bad_option",
            column=repeated[0],
            options=("--label",),
        )
    return labels


def _declare_table(talk: Interview, name: str, options: _Options) -> "Declared":
    from tasks.config import new_project as project

    header = project.header_of(options.paths[0]) if options.paths else ()
    if options.schema is not None:
        columns, target = project.of_schema(options.schema, _labels(options), options.person)
        target = project.of_number(target, counts=options.counts, quantile=options.quantile)
        spellings = project.spellings_of_schema(options.schema)
    else:
        _need_a_terminal("there is no terminal to ask for the columns; give them by --from schema.json.")
        if header:
            project.check_header(options.paths[0], header)
        spellings = {}
        columns, target = ask_for_columns(
            talk,
            header,
            labels=_labels(options),
            counts=options.counts,
            quantile=options.quantile,
            person=options.person,
        )
    max_records = options.at_most or _ask_for_number(talk)
    taken = [column["name"] for column in columns if column["kind"] != "ignored"]
    person = _person_of(talk, options, header, taken)
    table = project.table_of(columns, options.file, target, spellings, max_records, person["person"])
    declared = project.Declared(
        name, table, target, max_records, file=options.file, **options.for_all_kinds, **person
    )
    project.check_declared(declared)
    return declared


def _say_next(folder: Path, declared: "Declared", options: list[str]) -> None:
    """Print the assumed defaults, except those in `options`, and the next commands."""
    name = declared.name
    say(
        f"Created {folder} with these defaults; to change them, edit its data/cards/{name}.yaml before the first run:"
    )
    for words in declared.assumption_sentences(*options):
        say(f"  {words}")
    say(f"params.yaml has epsilon 1, delta {declared.delta:g} and suitable settings. Next, in {folder}:")
    if declared.file is None:
        say(f"  put the table at datasets/raw/{name}.csv; `data check` prints the checksum for the card")
    say(f"  epsilonflow data check {name}\n  epsilonflow plan\n  epsilonflow run")
    say(f'  git add --all && git commit --message "{name}"  # before `dvc exp run` or `dvc metrics diff`')


def _person_of(talk: Interview, options: _Options, header: Sequence[str], taken: Sequence[str]) -> "Document":
    """The column of the person's id and how many rows of a person are used, as given, or asked for at a terminal.

    taken: names of columns of which something is made.
    """
    from tasks.card_questions import are_people

    person, per_person = options.person, options.per_person
    if person is None and sys.stdin.isatty() and are_people(options.for_all_kinds["unit"]):
        person, per_person = ask_for_person(talk, header, taken)
    return {"person": person, "per_person": per_person or 1}


def _ask_for_number(talk: Interview) -> int:
    """Ask for the upper bound on the number of records; raises ParamsRefusedError if there is no terminal."""
    _need_a_terminal("an upper bound on the number of records is needed; give --at-most N.")
    return talk.ask("upper bound on the number of records", parse_whole_number)


def _need_a_terminal(otherwise: str) -> None:
    from tasks.config.params import ParamsRefusedError

    if not sys.stdin.isatty():
        raise ParamsRefusedError("{problem}", code="no_terminal", problem=otherwise)


def doctor() -> None:
    """Check this machine and checkout, and say what is wrong. Exit status 1 if anything is."""
    is_ill = False
    for name, check in _CHECKS.items():
        try:
            is_well, text = check(find_checkout() or Path.cwd())
        except (ValueError, OSError, RuntimeError, ImportError) as error:
            is_well, text = False, " ".join(str(error).split())
        mark = {True: "ok   ", False: "WRONG", None: "-    "}[is_well]
        say(f"{mark}  {name}: {text}")
        is_ill |= is_well is False
    if is_ill:
        raise typer.Exit(1)


# Each check of the doctor says whether all is well, None where something optional is missing, and a sentence.


def _python(_root: Path) -> tuple[bool, str]:
    return sys.platform != "win32", f"{platform.python_version()} on {sys.platform} (Windows only in WSL)"


def _torch(_root: Path) -> tuple[bool, str]:
    import torch

    from algorithms.privacy.barrier.device import device_name, device_of

    device = device_of("auto")
    text = "no usable GPU, so runs use the CPU" if device.type == "cpu" else device_name(device)
    return True, f"{torch.__version__}, {text}"


def _checkout(root: Path) -> tuple[bool, str]:
    missing = missing_in(root)
    if not any((folder / ".git").exists() for folder in (root, *root.parents)):
        missing.append(".git")
    if missing:
        return (
            False,
            f"{root} has no {', '.join(missing)}; change to a checkout, or run `epsilonflow init DIR`",
        )
    from tasks.config import params

    params.load(root / "params.yaml", reads=params.GROUPS)
    return True, "params.yaml is valid"


def _home(_root: Path) -> tuple[bool, str]:
    from tasks.config import home

    folder = home()
    return True, f"{folder}{'' if folder.exists() else ' (the first run creates it)'}"


def _ledger(root: Path) -> tuple[bool | None, str]:
    if not (root / "params.yaml").exists():
        from sqlalchemy import make_url

        from tasks.config import ledger_url

        url = make_url(ledger_url(None)).render_as_string(hide_password=True)
        return None, f"{url}; run this in a checkout to verify it"
    from tasks.runs.ledger import open_ledger

    ledger = open_ledger(root)
    ledger.verify()
    rows, populations = len(ledger.history()), len(ledger.populations())
    counted = f"{populations} population{'' if populations == 1 else 's'}"
    return True, f"the hash chain of {rows} rows is intact; {counted}"


def _stopped_runs(root: Path) -> tuple[bool | None, str]:
    if not (root / "params.yaml").exists():
        return None, "run this in a checkout to see those that it began"
    from tasks.runs.reservations import open_reservations

    sentences = [reservation.sentence() for reservation in open_reservations(root)]
    return (None, " ".join(sentences)) if sentences else (True, "none waits to be resumed")


def _owner_key(_root: Path) -> tuple[bool | None, str]:
    from data.files import OWNER_KEY, OWNER_PUB
    from tasks.config import home

    path = home() / OWNER_KEY
    if not path.exists() and (home() / OWNER_PUB).exists():
        return False, f"{path} is gone; restore it from a copy"
    if not path.exists():
        return None, "none yet; the first private run creates it. Then keep a copy in a safe place"
    others = path.stat().st_mode & 0o077
    return not others, f"{path}{' can be read by other users; run chmod 600 on it' if others else ''}"


def _version(package: str) -> str:
    from importlib.metadata import version

    return version(package)


def _dvc(root: Path) -> tuple[bool, str]:
    inside = (root / ".dvc").is_dir()
    return inside, f"{_version('dvc')}{'' if inside else ', but this folder has no .dvc'}"


def _prefect(root: Path) -> tuple[bool | None, str]:
    from flows.prefect_api import answers_at, no_server_at

    url = prefect_api_url()
    if url is None:
        start = "epsilonflow server start"
        return None, f"{_version('prefect')}, without a server, which runs do not need; `{start}` starts one"
    if not answers_at(url):
        return False, f"{_version('prefect')}, but {no_server_at(url)}"
    return True, f"{_version('prefect')}, with a server, which shows all runs"


def _wandb(root: Path) -> tuple[bool | None, str]:
    from tasks.config import params

    if not (root / "params.yaml").exists():
        return None, _version("wandb")
    mode = params.load(root / "params.yaml", reads=("tracking",)).tracking.mode
    has_key = "WANDB_API_KEY" in os.environ or _is_logged_in()
    named = f"{'WANDB_MODE' if os.environ.get('WANDB_MODE') else 'tracking.mode'} is {mode}"
    if mode == "online" and not has_key:
        return False, f"{named}, but you are not logged in: `wandb login`"
    return True, f"{_version('wandb')}, {named}"


def _is_logged_in() -> bool:
    """Whether the user's .netrc names the W&B server in use, as `wandb login` writes it."""
    server = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc(Path.home() / ".netrc").authenticators(server) is not None
    except (OSError, NetrcParseError):
        return False


def _mirror(_root: Path) -> tuple[bool | None, str]:
    from tasks.config import data_mirror

    mirror = data_mirror()
    if mirror is None:
        return None, "none, so data sets are downloaded"
    return mirror.is_dir(), f"{mirror}{'' if mirror.is_dir() else ', which is not a folder'}"


def _disk(root: Path) -> tuple[bool, str]:
    """Of the checkout and the home, the one with less room."""
    from tasks.config import home

    home_disk = next(folder for folder in (home(), *home().parents) if folder.is_dir())
    free, folder = min((shutil.disk_usage(folder).free / 1e9, folder) for folder in (root, home_disk))
    return free > _FREE_GB, f"{free:.0f} GB free in {folder}; at least {_FREE_GB:.0f} are recommended"


def _extras(_root: Path) -> tuple[bool | None, str]:
    packages = {"postgres": "psycopg", "dask": "prefect_dask", "ray": "prefect_ray", "models": "timm"}
    packages |= {"encoders": "wordllama", "export": "onnxruntime", "docs": "mkdocs"}
    there = [extra for extra, package in packages.items() if find_spec(package)]
    try:
        _version("epsilonflow")
    except ModuleNotFoundError:
        return False, "epsilonflow itself is not installed; run `make run` or `pip install -e .`"
    absent = ", ".join(sorted(packages.keys() - there)) or "none"
    text = f"{', '.join(there) or 'none'}; not installed: {absent}"
    from algorithms.models.libraries import torchvision_problem

    if (problem := torchvision_problem()) is not None:
        return None, f"{text}; {problem}"
    return True if there else None, text


_CHECKS: Mapping[str, Callable[[Path], tuple[bool | None, str]]] = {
    "Python": _python,
    "torch": _torch,
    "checkout": _checkout,
    "data folder": _home,
    "ledger": _ledger,
    "stopped runs": _stopped_runs,
    "owner key": _owner_key,
    "DVC": _dvc,
    "Prefect": _prefect,
    "Weights & Biases": _wandb,
    "mirror": _mirror,
    "disk": _disk,
    "extras": _extras,
}

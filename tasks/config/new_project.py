"""Create a project for `init`: a folder under git and DVC with parameters, stages, deployments and a data card.

The card contains what the owner of the data declares; no row of the data is read.
"""

import codecs
import csv
import gzip
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet
from ruamel.yaml import YAML

from algorithms.privacy.ledger import system_user
from data.card import DataRefusedError, File, data_card
from data.cells import Predicts, usual_cells
from data.documents import Document
from data.files import checksum_for, hide, owner_key, read_json
from data.formats import USUAL_MISSING
from data.readers.records import files_in
from data.readers.rows import NO_TABLES, SEPARATORS
from data.targets import Labels
from tasks.card_questions import are_people
from tasks.config import home
from tasks.config.overrides import ParamOverrides, params_edit
from tasks.config.params import ParamsRefusedError

TEMPLATES = Path(__file__).with_name("project")
_RAW = "datasets/raw"
_ZEROS = "0" * 64
_LONGEST_HEADER = 2**24
_SHOWN_COLUMNS = 10
"""Columns of a table whose defaults are printed."""
_IGNORED = (
    "/datasets/raw/",
    "/datasets/prepared/",
    "/artifacts/",
    "/models/",
    "/dvc_plots/",
    "/.wandb/",
    "/.prefect/",
    "/audits/",
    "/tuned/",
    "/ledger.html",
    "/authority.html",
    ".venv/",
)


@dataclass(frozen=True)
class Declared:
    """The declarations of the owner of a table, of texts or of images.

    reader: as in a data card. predicts: `classes` or `target` of the card. at_most: upper bound on the number of
    records. unit: what one record is. cap: epsilon that all runs together may spend. runs: how many are planned. file:
    the file or folder to copy. shape: of an image. encoder: of texts or images. person: the column that names the
    person, if a person may have several rows. per_person: how many rows of a person are used at most. public_why: why
    the held-out records are public, in a sentence; None for private ones.
    """

    name: str
    reader: Document
    predicts: Document
    at_most: int
    unit: str = "one person"
    cap: float = 10.0
    runs: int = 1
    file: Path | None = None
    shape: tuple[int, ...] | None = None
    encoder: str | None = None
    person: str | None = None
    per_person: int = 1
    public_why: str | None = None

    def assumption_sentences(self, *except_for: str) -> list[str]:
        """Sentences about the project's defaults, except those named: `cap`, `runs`, `unit` and `size`."""
        columns = self.reader.get("columns", []) if self.is_table else []
        missing = [str(column["name"]) for column in columns if "missing" in column]
        missing[_SHOWN_COLUMNS:] = [f"and {len(missing) - _SHOWN_COLUMNS} more"] * (
            len(missing) > _SHOWN_COLUMNS
        )
        cap = "" if "cap" in except_for else f"epsilon {self.cap:g} and "
        assumptions = {
            "caps": f"all runs together may spend {cap}delta {self.delta_cap:g}",
            "runs": "one run is planned, so the epsilons of runs add up; for many, composition: {kind: renyi, runs: N}",
            "unit": f"what one record is, and so what is protected: {self.unit}",
            "person": "each row is a person of its own; if a person may have several rows, give --person COLUMN"
            if self.person is None and self.shape is None and are_people(self.unit)
            else "",
            "share": "a fifth of the records is held out for evaluation "
            + (
                "and is as private as the rest: one noised histogram of it is released"
                if self.public_why is None
                else "and counts as public"
            ),
            "cells": "columns become cells of public grids, and random trees look at several columns at a time: `cells`"
            if self.is_table
            else "",
            "missing": f"a value may be missing, and then has cells of its own: {', '.join(missing)}"
            if missing
            else "",
            "spellings": "missing values are written as an empty field, NA, ?, - and the like: `missing`"
            if self.reader.get("missing") == list(USUAL_MISSING)
            else "",
            "lines": "each line of the file is a record; keep texts with line breaks in JSON lines or Parquet"
            if self.reader.get("format") == "csv"
            else "",
            "size": f"images are cropped and resized to {self.shape[-1]} by {self.shape[-1]}"
            if self.shape
            else "",
        }
        return [words for name, words in assumptions.items() if words and name not in except_for]

    @property
    def is_table(self) -> bool:
        """Whether the records are the rows of a table, not images or texts."""
        return self.reader["kind"] in ("csv", "parquet")

    @property
    def delta(self) -> float:
        """The delta of a run: a power of ten, at most 1e-5 and at most 1 / (10 at_most)."""
        return 10.0**-self._digits

    @property
    def delta_cap(self) -> float:
        """The cap of the population's delta: a hundred times the delta of a run."""
        return 10.0 ** (2 - self._digits)

    @property
    def _digits(self) -> int:
        return max(5, math.ceil(math.log10(self.at_most)) + 1)


_READ_DAYS = ("default", "%Y-%m-%d")
"""How the format of a schema's days begins if they are read."""


def of_schema(path: Path, label: Sequence[str], person: str | None = None) -> tuple[list[Document], Document]:
    """Read columns and target from a Frictionless Table Schema: its `fields`, with two bounds or with `enum`.

    label: the field of the class or, if it has bounds, of the number to predict; several fields are labels that a
    record has or does not have. Without it the schema's own `label` is used, or else the last field with an enum.
    person: the field that names the person, of which nothing else is made.

    Raises ParamsRefusedError if the file is not such a schema, or a field has no bounds.
    """
    fields, wanted = _schema_fields(path, label, person)
    limits = {field["name"]: field.get("constraints", {}) for field in fields}
    for field in fields:
        _check_writing(field, path)
    columns = [_column(field, path, wanted, person) for field in fields]
    if len(wanted) > 1:
        yes = set(Labels.model_fields["yes"].default)
        listed = [name for name in wanted if limits[name].get("enum")]
        odd = [name for name in listed if not yes & set(_enum(name, limits[name], path))]
        if odd:
            raise ParamsRefusedError(
                "{path}: a record has a label where its column holds {yes}, and {field!r}"
                " never does; write it so, or name one column.",
                code="bad_schema",
                path=path,
                yes=", ".join(sorted(yes)),
                field=odd[0],
            )
        return columns, target_keys(labels=wanted)
    column_bounds = limits[wanted[0]]
    if column_bounds.get("enum"):
        return columns, target_keys(classes=_enum(wanted[0], column_bounds, path))
    bounds = _bounds(wanted[0], column_bounds, path)
    if bounds is None:
        raise ParamsRefusedError(
            "{path}: nothing bounds the field {field!r}, which is predicted; give it an enum of classes, or"
            " minimum and maximum.",
            code="bad_schema",
            path=path,
            field=wanted[0],
        )
    return columns, target_keys(bounds=bounds)


def _schema_fields(path: Path, label: Sequence[str], person: str | None) -> tuple[list[Document], list[str]]:
    """The fields of a table schema, and the names of those that are predicted; see `of_schema`."""
    if not path.is_file():
        raise ParamsRefusedError(
            "there is no file {path}; name a table schema.", code="missing_file", path=path
        )
    try:
        schema = read_json(path)
        fields = [_with_enum(field) for field in schema["fields"]]
        limits = {field["name"]: field.get("constraints", {}) for field in fields}
        listed = [name for name in limits if limits[name].get("enum")]
        wanted = list(label) or [name for name in (schema.get("label"), *listed[-1:]) if name][:1]
        unknown = [name for name in wanted if name not in limits]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ParamsRefusedError(
            '{path} is no table schema; write {{"fields": [{{"name": ..., "type": ..., "constraints": ...}}]}}.',
            code="unreadable_file",
            path=path,
        ) from None
    if unknown or not wanted:
        raise ParamsRefusedError(
            "{path} has no field {field!r}; name one of its fields by --label."
            if unknown
            else "{path} has no field with an enum that could hold the class; name what is predicted by --label.",
            code="bad_option",
            path=path,
            field=next(iter(unknown), None),
            options=("--label",),
        )
    if person is not None and (person not in limits or person in wanted):
        raise ParamsRefusedError(
            "{path} has no field {person!r} beside what is predicted; name the field of the person's id by --person.",
            code="bad_option",
            path=path,
            person=person,
            options=("--person",),
        )
    return fields, wanted


def spellings_of_schema(path: Path) -> Document:
    """How the schema of `of_schema` says that a table is written: keys of its reader for missing values and decimals.

    An empty field is missing, too. Raises ParamsRefusedError for what cannot be declared so.
    """
    schema = read_json(path)
    shared = schema.get("missingValues", [])
    read = [field for field in schema["fields"] if not field.get("ignore")]
    lists = [_spellings(field.get("missingValues", shared), path) for field in read]
    if any({*spellings} != {*lists[0]} for spellings in lists):
        raise ParamsRefusedError(
            "{path}: missingValues differ between fields, and a table is read with one list; write missing values"
            " alike in the table and list them beside `fields`.",
            code="bad_schema",
            path=path,
        )
    marks = _decimal_marks(schema["fields"], path)
    decimal = {"decimal": ","} if "," in marks.values() else {}
    missing = lists[0] if lists else [""]
    return decimal | ({"missing": missing} if len(missing) > 1 or shared else {})


def _decimal_marks(fields: list[Document], path: Path) -> dict[str, str]:
    """The decimal mark of each field of numbers; raises ParamsRefusedError unless all have a point, or all a comma."""
    marks = {
        field["name"]: field.get("decimalChar", ".") for field in fields if field.get("type") == "number"
    }
    for name, mark in marks.items():
        if mark not in (".", ","):
            raise ParamsRefusedError(
                "{path}: the field {field!r} has another decimalChar than a point or a comma; change it.",
                code="bad_schema",
                path=path,
                field=name,
            )
        first = next(iter(marks))
        if mark != marks[first]:
            raise ParamsRefusedError(
                "{path}: the fields {first!r} and {field!r} have different decimalChars, and a table is read with one;"
                " write the numbers of the table alike.",
                code="bad_schema",
                path=path,
                first=first,
                field=name,
            )
    return marks


def _spellings(listed: Any, path: Path) -> list[str]:
    """How a missing value is written: as it is listed, by texts or with labels beside them, or as an empty field."""
    each: list[Any] = listed if isinstance(listed, list) else [None]
    texts: list[Any] = [
        spelling.get("value") if isinstance(spelling, dict) else spelling for spelling in each
    ]
    if not all(isinstance(text, str) for text in texts):
        raise ParamsRefusedError(
            '{path}: missingValues must be a list of texts; write it as in ["", "NA"].',
            code="bad_schema",
            path=path,
        )
    return [*dict.fromkeys(["", *(text.strip() for text in texts)])]  # values are trimmed, too


def _with_enum(field: Document) -> Document:
    """The field; one of type boolean has the enum of its true and false values, unless it has its own."""
    constraints = field.get("constraints", {})
    if field.get("type") != "boolean" or constraints.get("enum"):
        return field
    values = [*field.get("trueValues", [True]), *field.get("falseValues", [False])]
    return {**field, "constraints": {**constraints, "enum": values}}


def _check_writing(field: Document, path: Path) -> None:
    """Raises ParamsRefusedError for a field whose values are written in another way than they are read."""
    if field.get("ignore"):
        return
    if any(len(field.get(key, [""])) != 1 for key in ("trueValues", "falseValues")):
        raise ParamsRefusedError(
            "{path}: the field {field!r} must have one of trueValues and one of falseValues, as the table"
            ' writes them; give it an enum instead where there are more, as in ["no", "yes", "unknown"].',
            code="bad_schema",
            path=path,
            field=field["name"],
        )
    is_day, format_ = field.get("type") in ("date", "datetime"), str(field.get("format", "default"))
    unread_formats = {
        "format": (is_day and not format_.startswith(_READ_DAYS), "days are read as 2020-01-31"),
        "groupChar": (bool(field.get("groupChar")), "numbers are read without a mark between thousands"),
        "bareNumber": (field.get("bareNumber") is False, "numbers are read without a unit"),
    }
    for key, (is_other, how) in unread_formats.items():
        if is_other:
            raise ParamsRefusedError(
                "{path}: the field {field!r} has a {key}, and {how}; write the table so, and leave {key} out.",
                code="bad_schema",
                path=path,
                field=field["name"],
                key=key,
                how=how,
            )


def _enum(name: str, limits: Document, path: Path) -> list[str]:
    """The values that a field may have, as a table spells them: true for True."""
    values = limits["enum"]
    if not isinstance(values, list) or not all(isinstance(value, str | int | float) for value in values):
        raise ParamsRefusedError(
            "{path}: the enum of the field {field!r} must be a list of texts, numbers, true and false; write all its"
            ' values in brackets, as in ["no", "yes"], and leave out null, which is a missing value.',
            code="bad_schema",
            path=path,
            field=name,
        )
    if not any(isinstance(value, str | bool) for value in values) and all(
        float(v).is_integer() for v in values
    ):
        values = [int(value) for value in values]  # 1.0 and 1 are read as 1
    spelled = [str(value).lower() if isinstance(value, bool) else str(value) for value in values]
    odd = [text for text in spelled if text != text.strip() or len(text.splitlines()) != 1]
    if odd:
        raise ParamsRefusedError(
            "{path}: the enum of the field {field!r} lists {value!r}, and a value is one line of text without spaces"
            ' at its ends; write it so here and in the file, or leave the field out of the features by "ignore": true.'
            " An empty field is a missing value.",
            code="bad_schema",
            path=path,
            field=name,
            value=odd[0],
        )
    return spelled


def _bounds(name: str, limits: Document, path: Path) -> list[float] | None:
    """The minimum and maximum of a field; None if it does not have both."""
    endpoints: list[Any] = [limits.get("minimum"), limits.get("maximum")]
    if None in endpoints:
        return None
    try:
        bounds = [float(end) for end in endpoints]
    except (ValueError, TypeError, OverflowError):
        bounds = [math.nan, math.nan]
    if not 0 < bounds[1] - bounds[0] < math.inf or any(isinstance(end, bool) for end in endpoints):
        raise ParamsRefusedError(
            "{path}: minimum and maximum of the field {field!r} must be finite numbers, the minimum the smaller one;"
            ' write such numbers, or for dates and texts leave the field out of the features by "ignore": true.',
            code="bad_schema",
            path=path,
            field=name,
        )
    return bounds


def target_keys(
    *,
    classes: Sequence[str] = (),
    labels: Sequence[str] = (),
    bounds: Sequence[float] = (),
    tags: Sequence[str] = (),
    next_token: bool = False,
) -> Document:
    """The keys of a card for a target: classes, several labels, a number between bounds, tags or the next token.

    Raises ParamsRefusedError unless exactly one is given.
    """
    if not any((classes, labels, bounds, tags, next_token)):
        raise ParamsRefusedError(
            "nothing says what is predicted; name the classes by --classes NAME,NAME, or see --bounds, --tags,"
            " --next-token and several columns of --label.",
            code="bad_option",
            options=("--classes", "--bounds", "--tags", "--next-token"),
        )
    if sum(map(bool, (classes, labels, bounds, tags, next_token))) > 1:
        raise ParamsRefusedError(
            "one thing is predicted of a record; give one of --classes, --bounds, --tags, --next-token and several"
            " columns of --label.",
            code="bad_option",
            options=("--classes", "--bounds", "--tags", "--next-token"),
        )
    if next_token:
        return {"target": {"next": "token"}}
    if tags:
        return {"target": {"tags": list(tags), **({"outside": "O"} if "O" in tags else {})}}
    if labels or bounds:
        return {"target": {"labels": list(labels)} if labels else {"bounds": list(bounds)}}
    return {"classes": list(classes)}


def of_number(predicts: Document, *, counts: bool, quantile: float | None) -> Document:
    """The keys of a card for a number's mean, for that of counts, or for a quantile.

    Raises ParamsRefusedError where no number is predicted, or both are asked for.
    """
    check_statistic(counts=counts, quantile=quantile)
    if not counts and quantile is None:
        return dict(predicts)
    if "bounds" not in predicts.get("target", {}):
        raise ParamsRefusedError(
            "--{name} is for a number to predict, with bounds; leave it out.",
            code="bad_option",
            name="counts" if counts else "quantile",
            options=(f"--{'counts' if counts else 'quantile'}",),
        )
    return {"target": predicts["target"] | ({"counts": True} if counts else {"quantile": quantile})}


def check_statistic(*, counts: bool, quantile: float | None) -> None:
    """Raise ParamsRefusedError for a quantile that is none, or if counts are asked for, too."""
    if counts and quantile is not None:
        raise ParamsRefusedError(
            "--counts is for the mean of counts, and --quantile for a quantile; give one.",
            code="bad_option",
            options=("--counts", "--quantile"),
        )
    if quantile is not None and not 0 < quantile < 1:
        raise ParamsRefusedError(
            "--quantile is {quantile:g}; give a number between 0 and 1, such as 0.9.",
            code="bad_option",
            quantile=quantile,
            options=("--quantile",),
        )


def number_column(name: str, bounds: Sequence[float], *, is_required: bool = False) -> Document:
    """A column of numbers between bounds; unless they are required, the middle stands for a missing one."""
    column = {"name": name, "kind": "numeric", "bounds": list(bounds)}
    return column if is_required else column | {"missing": sum(bounds) / 2}


def category_column(name: str, categories: Sequence[str], *, is_ordered: bool = False) -> Document:
    """A column of categories, in an order that means something if `is_ordered`."""
    column = {"name": name, "kind": "categorical", "categories": list(categories)}
    return column | ({"ordered": True} if is_ordered else {})


def day_column(name: str, bounds: Sequence[str]) -> Document:
    """A column of days between the first and the last one, such as 2020-01-31."""
    return {"name": name, "kind": "timestamp", "bounds": list(bounds)}


def text_column(name: str, cells: int = 64) -> Document:
    """A column of texts of very many values, of which a public hash makes one of so many cells."""
    return {"name": name, "kind": "hashed", "cells": cells}


def _column(field: Document, path: Path, label: Sequence[str], person: str | None) -> Document:
    name, limits = field["name"], field.get("constraints", {})
    if name in label:
        return {"name": name, "kind": "label"}
    if field.get("ignore") or name == person:
        return {"name": name, "kind": "ignored"}
    if limits.get("enum"):
        categories = _enum(name, limits, path)
        if len(set(categories)) < 2:
            raise ParamsRefusedError(
                "{path}: the enum of the field {field!r} has one value, of which a model learns nothing; list all"
                ' values that it may have, or leave the field out of the features by "ignore": true.',
                code="bad_schema",
                path=path,
                field=name,
            )
        is_ordered = bool(limits.get("ordered") or field.get("categoriesOrdered"))
        return category_column(name, categories, is_ordered=is_ordered)
    if field.get("type") in ("date", "datetime") and None not in (
        days := [limits.get(end) for end in ("minimum", "maximum")]
    ):
        return day_column(name, [str(day)[:10] for day in days])
    bounds = _bounds(name, limits, path)
    if bounds is not None:
        return number_column(name, bounds, is_required=bool(limits.get("required")))
    if isinstance(cells := field.get("hashed"), int) and not isinstance(cells, bool):
        return text_column(name, cells)
    raise ParamsRefusedError(
        "{path}: nothing bounds the field {field!r}; give it minimum and maximum, or enum, or for texts of very many"
        ' values "hashed": 64, or "ignore": true.',
        code="bad_schema",
        path=path,
        field=name,
    )


def check(folder: Path, files: Sequence[Path], *, is_table: bool) -> None:
    """Raise ParamsRefusedError if no project can be made in `folder`, or unless at most one existing path is given.

    is_table: whether the path has to be a file, not a folder.
    """
    if folder.exists() and not folder.is_dir():
        raise ParamsRefusedError("{path} is a file; name a new folder.", code="bad_output", path=folder)
    if files[1:]:
        raise ParamsRefusedError(
            "a project is of one kind of records; give one of --file, --images and --texts.",
            code="bad_option",
            options=("--file", "--images", "--texts"),
        )
    if files and not files[0].exists():
        otherwise = ", or leave --file out until there is a file" if is_table else ""
        raise ParamsRefusedError(
            "there is no {path}; give the path of the records{otherwise}.",
            code="missing_file",
            path=files[0],
            otherwise=otherwise,
        )
    if files and is_table and files[0].is_dir():
        raise ParamsRefusedError(
            "{path} is a folder, and --file takes a table; name a CSV or Parquet file, or give a folder of"
            " images by --images.",
            code="unreadable_file",
            path=files[0],
        )
    if files and is_table and files[0].suffix.lower() in NO_TABLES:
        raise ParamsRefusedError(
            "{path} is no CSV or Parquet file; save the table as one of them, and name that by --file.",
            code="unreadable_file",
            path=files[0],
        )
    if files and is_table and _is_utf_16(files[0]):
        raise ParamsRefusedError(
            "{path} is UTF-16; save the table as UTF-8.", code="unreadable_file", path=files[0]
        )
    if files and files[0].is_dir() and folder.resolve().is_relative_to(files[0].resolve()):
        raise ParamsRefusedError(
            "{path} would lie in {source}, which is copied into it; name a new folder outside of it.",
            code="bad_output",
            path=folder,
            source=files[0],
        )
    if _entries(folder):
        raise ParamsRefusedError("{path} is not empty; name a new folder.", code="bad_output", path=folder)


def _is_utf_16(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def _entries(folder: Path) -> list[Path]:
    """What is in a folder that a project is to be made in, but for the repository that was made there before."""
    return [path for path in folder.iterdir() if path.name != ".git"] if folder.exists() else []


def make(folder: Path, declared: Declared) -> None:
    """Create the project; if anything fails, remove all of it.

    Raises ParamsRefusedError if `folder` is not empty or what was declared does not fit together.
    """
    check(folder, [] if declared.file is None else [declared.file], is_table=declared.is_table)
    was_there = folder.exists()
    try:
        _fill(folder, declared)
    except BaseException:
        for made in _entries(folder) if was_there else [folder]:
            shutil.rmtree(made) if made.is_dir() else made.unlink(missing_ok=True)
        raise


def _fill(folder: Path, declared: Declared) -> None:
    (folder / "data" / "cards").mkdir(parents=True)
    shutil.copyfile(TEMPLATES / "params.yaml", folder / "params.yaml")
    # Under the name dvc.yaml, DVC would find the template.
    shutil.copyfile(TEMPLATES / "stages.yaml", folder / "dvc.yaml")
    deployments = (TEMPLATES / "prefect.yaml").read_text(encoding="utf-8").replace("NAME", declared.name, 1)
    (folder / "prefect.yaml").write_text(deployments, encoding="utf-8")
    needed = f"# On no package index: pip installs it from a clone.\nepsilonflow=={version('epsilonflow')}\n"
    (folder / "requirements.txt").write_text(needed, encoding="utf-8")
    (folder / ".gitignore").write_text("".join(f"{line}\n" for line in _IGNORED), encoding="utf-8")
    for ignored in (folder / _RAW).parent, folder / _RAW:
        ignored.mkdir(mode=0o700)
    path = f"{_RAW}/{declared.name}{declared.file.suffix if declared.file else '.csv'}"
    checksum = _ZEROS
    if declared.file is not None:
        if declared.file.is_dir():
            files_in(declared.file)  # refuses links that would be copied without end
        copy = shutil.copytree if declared.file.is_dir() else shutil.copyfile
        try:
            copy(declared.file, folder / path)
        except shutil.Error as error:
            raise ParamsRefusedError(
                "{path} cannot be copied; remove it if it is a link to nothing, or change its permissions.",
                code="unreadable_file",
                path=error.args[0][0][0],
            ) from None
        hide(folder / path)
        file = File(path=path, keyed_sha256=_ZEROS)
        checksum = (checksum_for(folder / path, file, key=owner_key(home())) or "").partition(" ")[2]
    cards = folder / "data" / "cards"
    _write_card(cards, declared, path, checksum)
    overrides = ParamOverrides(declared.name, "dp_sgd", 1.0, declared.delta, encoder=declared.encoder)
    params_edit(folder, overrides).write()
    _put_under_git_and_dvc(folder)


def check_declared(declared: Declared) -> None:
    """Raise ParamsRefusedError if no data card can be made of what was declared."""
    with tempfile.TemporaryDirectory(prefix="epsilonflow-") as folder:
        _write_card(Path(folder), declared, f"{_RAW}/{declared.name}.csv", _ZEROS)


def _write_card(cards: Path, declared: Declared, path: str, checksum: str) -> None:
    _write(cards / f"{declared.name}.yaml", _card(declared, path, checksum))
    try:
        data_card(declared.name, cards)
    except DataRefusedError as error:
        what = (
            str(error).partition(f"{declared.name}.yaml")[2].removesuffix("; correct the card.").lstrip(",: ")
        )
        raise ParamsRefusedError(
            "no data card can be made of what was declared ({what}); change that.",
            code="bad_card",
            what=what,
        ) from None


def _put_under_git_and_dvc(folder: Path) -> None:
    """Under the git repository that the folder lies in, or else under one of its own.

    A repository in another one is not committed with it. One that ignores the folder is not its repository.
    """
    inside = _git(folder, "rev-parse", "--show-prefix")
    has_repository = inside is not None and (
        not inside or _git(folder, "check-ignore", "--quiet", ".") is None
    )
    commands = [] if has_repository else [["git", "init", "--quiet"]]
    is_below = ["--subdir"] if has_repository and inside else []
    commands.append([sys.executable, "-P", "-m", "dvc", "init", "--quiet", *is_below])
    env = os.environ | {"LOGNAME": system_user()}  # DVC needs a name
    for command in commands:
        subprocess.run(command, cwd=folder, env=env, check=True, capture_output=True)


def _git(folder: Path, *arguments: str) -> str | None:
    """What a git command writes in a folder; None if it fails."""
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def _card(declared: Declared, path: str, checksum: str) -> Document:
    return {
        "name": declared.name,
        "title": f"The {declared.name} data set",
        "source": "declared by its owner",
        "licence": "not for publication",
        "citation": "none",
        "public": False,
        "unit": declared.unit,
        "population": declared.name,
        "cap": {"epsilon": declared.cap, "delta": declared.delta_cap},
        **({} if declared.runs == 1 else {"composition": {"kind": "renyi", "runs": declared.runs}}),
        **(
            {"holdout": "private"}
            if declared.public_why is None
            else {"holdout": "public", "holdout_why": declared.public_why}
        ),
        "records": {"at_most": declared.at_most},
        **declared.predicts,
        "files": {"train": {"path": path, "keyed_sha256": checksum}},
        "split": {
            "salt": declared.name,
            "test_fraction": 0.2,
            **({"copies": "apart"} if declared.is_table and declared.person is None else {}),
        },
        "reader": dict(declared.reader),
        **({} if declared.shape is None else {"shape": list(declared.shape)}),
        **(
            {}
            if declared.person is None
            else {"person": {"column": declared.person, "per_person": declared.per_person}}
        ),
    }


def absolute(encoder: str) -> str:
    """The name of an encoder, with an absolute path if it names a folder, so that it is found from the project."""
    kind, _, name = encoder.partition("/")
    return f"{kind}/{Path(name).resolve()}" if name and Path(name).is_dir() else encoder


def of_images(
    name: str,
    folder: Path,
    classes: Sequence[str],
    at_most: int,
    size: int,
    *,
    encoder: str | None = None,
    **others: Any,
) -> Declared:
    """Declare a folder with one subfolder per class; raises ParamsRefusedError if it is not a folder."""
    if not folder.is_dir():
        raise ParamsRefusedError(
            "{path} is no folder; give one with one folder of images per class.",
            code="unreadable_file",
            path=folder,
        )
    reader, shape = {"kind": "images", "mode": "RGB", "fit": "crop"}, (3, size, size)
    return Declared(
        name,
        reader,
        target_keys(classes=classes),
        at_most,
        file=folder,
        shape=shape,
        encoder=encoder or "efficientnet-lite0",
        **others,
    )


def of_texts(
    name: str,
    file: Path,
    columns: Sequence[str],
    label: Sequence[str],
    predicts: Document,
    at_most: int,
    *,
    encoder: str | None = None,
    **others: Any,
) -> Declared:
    """Declare rows with texts, and the columns of the target, none for the next token.

    encoder: by default word vectors, or for tags a small public model. Raises ParamsRefusedError for a file with
    another suffix, or if the next token is predicted and no model is named.
    """
    formats = {".csv": "csv", ".jsonl": "jsonl", ".parquet": "parquet"}
    if file.suffix not in formats or not file.is_file():
        raise ParamsRefusedError(
            "{path} is no file that ends in {formats}; give one with one text per row.",
            code="unreadable_file",
            path=file,
            formats=", ".join(formats),
        )
    target = predicts.get("target", {})
    if "next" in target and encoder is None:
        raise ParamsRefusedError(
            "the next token is predicted by a causal model, such as GPT-2; name it by --encoder tokenizer/NAME, or"
            " tokenizer/FOLDER.",
            code="bad_option",
            options=("--encoder",),
        )
    usual = "tokenizer/all-minilm-l6-v2" if "tags" in target else "wordllama"
    reader = {"kind": "texts", "format": formats[file.suffix], "columns": list(columns)}
    reader_keys: Document = {"label": list(label) if len(label) > 1 else label[0]} if label else {}
    if formats[file.suffix] == "csv":
        reader_keys |= _header_of(file)[0]
    return Declared(
        name, reader | reader_keys, predicts, at_most, file=file, encoder=encoder or usual, **others
    )


def table_of(
    columns: Sequence[Document],
    file: Path | None,
    predicts: Document,
    spellings: Document,
    at_most: int,
    person: str | None = None,
) -> Document:
    """The reader of a table of these columns, and of one with the person's id, of which nothing is made.

    predicts: as in `Declared`. spellings: of `spellings_of_schema`.
    """
    if person is not None and all(column["name"] != person for column in columns):
        columns = [*columns, {"name": person, "kind": "ignored"}]
    suffixes = [] if file is None else file.suffixes
    reader: Document = {"kind": "parquet" if ".parquet" in suffixes[-1:] else "csv"}
    if file is not None and reader["kind"] == "csv":
        reader |= _header_of(file)[0]
    written = {"missing": list(USUAL_MISSING)} | spellings
    reader |= {key: value for key, value in written.items() if key == "missing" or reader["kind"] == "csv"}
    cells = usual_cells(_kind_of(predicts), classes=len(predicts.get("classes", ())), records=at_most)
    return {**reader, "cells": cells.model_dump(mode="json"), "columns": [dict(column) for column in columns]}


def _kind_of(predicts: Document) -> Predicts:
    """What keys of a card predict. predicts: as in `Declared`."""
    if "classes" in predicts:
        return "classes"
    target = predicts["target"]
    if "labels" in target:
        return "labels"
    return "count" if target.get("counts") else "quantile" if "quantile" in target else "number"


def header_of(file: Path) -> tuple[str, ...]:
    """The names of a table's columns, from its first line or its schema; none if they cannot be read so."""
    try:
        if ".jsonl" in file.suffixes:
            return ()
        if file.suffix == ".parquet":
            return tuple(parquet.read_schema(file).names)
        return _header_of(file)[1]
    except (OSError, ValueError, pa.ArrowException):
        return ()


def check_header(file: Path, header: Sequence[str]) -> None:
    """Raise ParamsRefusedError for a first line that is a title or a record, whose values a card would publish."""
    if len(header) == 1:
        raise ParamsRefusedError(
            "the first line of {path} names a single column, and a model needs one to predict and another one; take out"
            " what is above the line of the columns' names, or declare the columns by --from schema.json.",
            code="unreadable_file",
            path=file,
        )
    numbers = [name for name in header if _is_number(name)]
    if 2 * len(numbers) > len(header) and not _are_counted(numbers):
        raise ParamsRefusedError(
            "the first line of {path} holds numbers, not names of columns; write a line of names above the first"
            " record, or declare the columns by --from schema.json.",
            code="unreadable_file",
            path=file,
        )


def _is_number(text: str) -> bool:
    try:
        float(text.replace(",", "."))
    except ValueError:
        return False
    return True


def _are_counted(numbers: Sequence[str]) -> bool:
    """Whether these are names that a program counted, such as pandas's 0, 1, 2 and so on for columns without one."""
    first = int(numbers[0]) if numbers[0].isdecimal() else 0
    return list(numbers) == [str(first + index) for index in range(len(numbers))]


def _header_of(file: Path) -> tuple[dict[str, str], tuple[str, ...]]:
    """How a text's first line is written, as the reader of a card says it, and the fields of that line.

    It says the separator and the encoding where they are not as usual; no fields if the line cannot be read.
    """
    reader: dict[str, str] = {}
    try:
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as opened:
            first = opened.readline(_LONGEST_HEADER)
        try:
            line = first.decode("utf-8-sig").rstrip("\r\n")
        except UnicodeDecodeError:
            reader["encoding"] = "windows-1252"
            line = first.decode("windows-1252", "replace").rstrip("\r\n")
        fields = {mark: tuple(next(csv.reader([line], delimiter=mark), ())) for mark in SEPARATORS}
    except (OSError, EOFError, ValueError, csv.Error):
        return ({"separator": "\t"} if ".tsv" in file.suffixes else {}), ()
    separator = "\t" if ".tsv" in file.suffixes else max(SEPARATORS, key=lambda mark: len(fields[mark]))
    reader |= {"separator": separator} if separator != "," else {}
    return reader, tuple(name.strip() for name in fields[separator])


def _write(path: Path, document: Document) -> None:
    yaml = YAML()
    yaml.width = 120
    with path.open("w", encoding="utf-8") as file:
        file.write(
            "# What may be known about these records, as their owner declares it; nothing was computed from them.\n"
        )
        yaml.dump(document, file)

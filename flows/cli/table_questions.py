"""What `init` asks about a table without a schema: what is predicted, and what is made of each other column.

The names of a file's columns are all that the questions know of it: no row is read for them, or for a default.
"""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from flows.cli.answers import (
    parse_bounds,
    parse_choice,
    parse_count_bounds,
    parse_days,
    parse_names,
    parse_whole_number,
)
from flows.cli.interview import BACK, Interview
from flows.cli.running import say

if TYPE_CHECKING:
    from data.documents import Document

_TARGETS = {"class": "class", "number": "number", "count": "count (how often something happened)"}
_KINDS = {
    "numeric": "numeric",
    "categorical": "categorical",
    "ordered": "ordered (categories from low to high)",
    "day": "day",
    "text": "text (of very many different values)",
    "ignored": "ignored",
}
"""What a column may be, each with the words of the question."""
_NAMES = "separated by commas, in quotes where one has a comma"
_BOUNDS = "  its lowest and highest possible value, separated by a comma"


def ask_for_columns(
    talk: Interview,
    header: Sequence[str],
    *,
    labels: Sequence[str],
    counts: bool,
    quantile: float | None,
    person: str | None,
) -> "tuple[list[Document], Document]":
    """Ask the owner of a table for its columns, and for what is predicted: the columns and the target of a card.

    header: the names of the file's columns, each of which is asked about; empty if there is no file yet.
    labels, counts, quantile, person: what the options say, which is not asked; several labels are 0 or 1 each.

    Raises ParamsRefusedError if the options do not fit the file, or each other.
    """
    left_out = sorted({name for name in header if not name or header.count(name) > 1})
    header = [name for name in header if name not in left_out]
    _check_labels(labels, header, person)
    if left_out:
        listed = ", ".join(map(repr, left_out))
        say(
            f"Columns without a name of their own are left out: {listed}. Rename them in the file to use them."
        )
    if header:
        say(f"The file has the columns {', '.join(header)}. Answer {BACK} to go back by one question.")
    else:
        say(
            "Enter the columns as the file's header names them. An empty name ends the list;"
            f" {BACK} goes back by one question."
        )
    possible = [name for name in header if name != person]
    entered: list[Document] = [] if person is None else [{"name": person, "kind": "ignored"}]
    parse_label = partial(_one_of, names=possible) if header else partial(_other_column, columns=entered)
    names = [*labels] or [talk.ask("column to predict", parse_label)]
    target = _target(talk, names, counts=counts, quantile=quantile)
    label_columns: list[Document] = [{"name": name, "kind": "label"} for name in names]
    columns: list[Document] = []
    if header:
        columns += [_column(talk, name) for name in possible if name not in names]
    else:
        entered += label_columns
        while name := talk.ask(
            "another column", partial(_other_column, columns=[*entered, *columns]), default=""
        ):
            columns.append(_column(talk, name))
    return [*columns, *label_columns], target


def ask_for_person(talk: Interview, header: Sequence[str], taken: Sequence[str]) -> tuple[str | None, int]:
    """Ask which column names the person, None if each row is another one, and how many rows of a person are used.

    taken: names of columns of which something is made.
    """
    question = (
        "column of the person's id, if a person may have several rows; nothing if each row is another person"
    )
    person = talk.ask(question, partial(_other_person, header=header, taken=taken), default="") or None
    if person is None:
        return None, 1
    return person, talk.ask("how many rows of each person are used at most", parse_whole_number)


def _check_labels(labels: Sequence[str], header: Sequence[str], person: str | None) -> None:
    from tasks.config.params import ParamsRefusedError

    possible = [name for name in header if name != person]
    odd = [name for name in labels if name == person or (header and name not in possible)]
    if odd:
        raise ParamsRefusedError(
            "the table has no column {column!r} that could be predicted; name one of {possible} by --label."
            if header
            else "{column!r} is the person's id, which is not predicted; name another column by --label.",
            code="bad_option",
            column=odd[0],
            possible=", ".join(possible),
            options=("--label",),
        )


def _target(talk: Interview, labels: Sequence[str], *, counts: bool, quantile: float | None) -> "Document":
    """Ask what the column of the label holds: the keys of a card for it, or for several labels."""
    from tasks.config import new_project as project

    if len(labels) > 1:
        target = project.target_keys(labels=labels)
        return project.of_number(target, counts=counts, quantile=quantile)
    if counts or quantile is not None:
        kind = "count" if counts else "number"
    else:
        question = f"  {labels[0]} is one of {', '.join(_TARGETS.values())}"
        kind = talk.ask(question, partial(parse_choice, choices=tuple(_TARGETS)), default="class")
    if kind == "class":
        return project.target_keys(classes=talk.ask(f"  its classes, {_NAMES}", parse_names))
    if kind == "count":
        bounds = talk.ask("  its highest possible value; the lowest is 0", parse_count_bounds)
    else:
        bounds = talk.ask(_BOUNDS, parse_bounds)
    target = project.target_keys(bounds=bounds)
    return project.of_number(target, counts=kind == "count", quantile=quantile)


def _column(talk: Interview, name: str) -> "Document":
    """Ask what is made of a column."""
    from tasks.config import new_project as project

    question = f"  {name} is one of {', '.join(_KINDS.values())}"
    kind = talk.ask(question, partial(parse_choice, choices=tuple(_KINDS)), default="numeric")
    if kind == "numeric":
        return project.number_column(name, talk.ask(_BOUNDS, parse_bounds))
    if kind == "categorical":
        return project.category_column(name, talk.ask(f"  its categories, {_NAMES}", parse_names))
    if kind == "ordered":
        categories = talk.ask(f"  its categories from low to high, {_NAMES}", parse_names)
        return project.category_column(name, categories, is_ordered=True)
    if kind == "day":
        return project.day_column(
            name, talk.ask("  its first and last possible day, as 2020-01-01,2024-12-31", parse_days)
        )
    return project.text_column(name) if kind == "text" else {"name": name, "kind": "ignored"}


def _one_of(text: str, names: Sequence[str]) -> str:
    if text.strip() not in names:
        raise ValueError(f"{text.strip()!r} is none of these columns; enter one of {', '.join(names)}.")
    return text.strip()


def _other_person(text: str, header: Sequence[str], taken: Sequence[str]) -> str:
    name = text.strip()
    if name in taken:
        raise ValueError(
            f"{name} is a feature or predicted, so something is made of it; enter another column."
        )
    return _one_of(name, header) if name and header else name


def _other_column(text: str, columns: "Sequence[Document]") -> str:
    name = text.strip()
    if any(column["name"] == name for column in columns):
        raise ValueError(f"{name} has been entered; enter another column.")
    if not name and all(column["kind"] in ("ignored", "label") for column in columns):
        raise ValueError("A model needs a column that is not ignored; enter one.")
    return name

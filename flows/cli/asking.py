"""Ask the owner of a table for its columns at a terminal; no row is read."""

import math
import sys
from typing import Any

import typer

from tasks.config.params import ParamsRefusedError

KINDS = ("numeric", "categorical", "ignored")


def columns_asked() -> tuple[list[dict[str, Any]], list[str]]:
    """Ask for columns and classes; raises ParamsRefusedError if there is no terminal."""
    if not sys.stdin.isatty():
        raise ParamsRefusedError(
            "there is no terminal to ask for the columns; give them by --from schema.json."
        )
    typer.echo("Enter the columns as the file's header names them. An empty name ends the list.")
    columns: list[dict[str, Any]] = []
    while name := typer.prompt("column", default="", show_default=False):
        kind = _kind(name)
        if kind == "numeric":
            low, high = _bounds()
            columns.append({"name": name, "kind": kind, "bounds": [low, high], "missing": (low + high) / 2})
        elif kind == "categorical":
            columns.append(
                {"name": name, "kind": kind, "categories": _listed("  its categories, separated by commas")}
            )
        else:
            columns.append({"name": name, "kind": "ignored"})
    label = typer.prompt("column of the class to predict")
    return [*columns, {"name": label, "kind": "label"}], _listed("its classes, separated by commas")


def _kind(name: str) -> str:
    while True:
        kind = str(typer.prompt(f"  {name} is one of {', '.join(KINDS)}", default=KINDS[0]))
        if kind in KINDS:
            return kind
        typer.echo(f"  {kind} is none of these.")


def _bounds() -> tuple[float, float]:
    while True:
        low, high = (typer.prompt(f"  its {end} possible value", type=float) for end in ("lowest", "highest"))
        if -math.inf < low < high < math.inf:
            return low, high
        typer.echo("  Both must be finite, and the lowest value below the highest.")


def number_asked() -> int:
    """Ask for the upper bound on the number of records; raises ParamsRefusedError if there is no terminal."""
    if not sys.stdin.isatty():
        raise ParamsRefusedError("an upper bound on the number of records is needed; give --at-most N.")
    while True:
        most: int = typer.prompt("upper bound on the number of records", type=int)
        if most >= 1:
            return most
        typer.echo("  It is 1 at least.")


def _listed(question: str) -> list[str]:
    return listed(str(typer.prompt(question)))


def listed(text: str) -> list[str]:
    """Split a text at commas; empty parts are left out."""
    return [part.strip() for part in text.split(",") if part.strip()]


def two_numbers(text: str) -> list[float]:
    """Parse "LOW,HIGH"; an empty text gives no numbers, anything else raises ParamsRefusedError."""
    try:
        found = [float(part) for part in listed(text)]
    except ValueError:
        found = [math.nan]
    if found and (len(found) != 2 or not -math.inf < found[0] < found[1] < math.inf):
        raise ParamsRefusedError(f"--bounds takes LOW,HIGH, such as 1,5, not {text!r}.")
    return found

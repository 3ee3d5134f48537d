"""What people write as options and answers: lists, bounds, days and numbers. What cannot be is a ValueError."""

import csv
import math
from collections.abc import Sequence


def parse_choice(text: str, choices: Sequence[str]) -> str:
    """One of some words, in whatever case."""
    choice = text.strip().lower()
    if choice not in choices:
        raise ValueError(f"{text} is none of these; enter one of {', '.join(choices)}.")
    return choice


def parse_whole_number(text: str) -> int:
    """A whole number, 1 at least."""
    if not text.isdecimal() or int(text) < 1:
        raise ValueError("It is a whole number, 1 at least.")
    return int(text)


def split_list(text: str) -> list[str]:
    """Split a text at commas, but not at those in double quotes; empty parts are left out.

    Example:
        >>> split_list('Ulm, "Bonn, am Rhein"')
        ['Ulm', 'Bonn, am Rhein']
    """
    from tasks.config.params import ParamsRefusedError

    try:
        parts = next(csv.reader([text], skipinitialspace=True, strict=True), [])
    except csv.Error:
        raise ParamsRefusedError(
            "a quote is not closed in {text!r}; put a whole name in quotes.",
            code="bad_option",
            text=text,
        ) from None
    return [part.strip() for part in parts if part.strip()]


def parse_names(text: str) -> list[str]:
    """Two names or more, as of classes or categories."""
    names = split_list(text)
    if len(names) < 2 or len(set(names)) < len(names):
        raise ValueError("Enter at least 2, each once.")
    return names


def parse_bounds(text: str) -> tuple[float, float]:
    """Parse LOW,HIGH; raises ParamsRefusedError for anything else."""
    from tasks.config.params import ParamsRefusedError

    try:
        low, high = map(float, text.split(","))
    except ValueError:
        low = high = math.nan
    if not -math.inf < low < high < math.inf:
        raise ParamsRefusedError(
            "bounds are LOW,HIGH, two finite numbers such as 1,5, not {text!r}.",
            code="bad_option",
            text=text,
            options=("--bounds",),
        )
    return low, high


def parse_count_bounds(text: str) -> tuple[float, float]:
    """The bounds of a count, which begins at 0, from the highest one."""
    return parse_bounds(f"0,{parse_whole_number(text.strip())}")


def parse_days(text: str) -> tuple[str, str]:
    """Parse FIRST,LAST, two days that bound a column of days.

    Example:
        >>> parse_days("2020-01-01, 2024-12-31")
        ('2020-01-01', '2024-12-31')
    """
    from data.formats import Timestamp

    first, _, last = text.partition(",")
    try:
        return Timestamp(name="day", kind="timestamp", bounds=(first.strip(), last.strip())).bounds
    except ValueError:
        raise ValueError(
            "Enter two days that there are, the first before the last and 200 years apart at most,"
            f" as 2020-01-01,2024-12-31, not {text!r}."
        ) from None

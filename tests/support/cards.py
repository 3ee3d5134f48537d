"""Documents of data cards, of made-up records."""

from typing import Any

Document = dict[str, Any]


def card(name: str, **keys: Any) -> Document:
    """What every card says, of private records, with these keys beside it or instead."""
    return {
        "name": name,
        "title": "Made-up records",
        "source": "this test",
        "licence": "CC0",
        "citation": "none",
        "public": False,
        "unit": "one person",
        "population": name,
        "cap": {"epsilon": 10.0, "delta": 0.01},
        "holdout": "public",
    } | keys


def number(name: str, low: float, high: float) -> Document:
    return {"name": name, "kind": "numeric", "bounds": [low, high]}


def category(name: str, *categories: str) -> Document:
    return {"name": name, "kind": "categorical", "categories": [*categories]}


def label(name: str) -> Document:
    return {"name": name, "kind": "label"}


def csv_of(*columns: Document) -> Document:
    """The reader of a table with these columns."""
    return {"kind": "csv", "columns": [*columns]}

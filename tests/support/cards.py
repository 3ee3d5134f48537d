"""Documents of data cards, of made-up records."""

import json
from typing import Any

from data.card import DataCard

Document = dict[str, Any]
DEPLOYMENT = {
    "curators": ["The clinic"],
    "use": "planning of beds",
    "region": "Norway",
    "contact": "privacy@example.org",
    "published": "2026-01-31",
}


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


def animals(**more: Any) -> DataCard:
    """The card of the data set that `synthetic_run` names."""
    document = card("animals", classes=["cat", "dog"], records={"at_most": 500}, **more)
    document["reader"] = csv_of(category("fur", "long", "short"), label("kind"))
    document["files"] = {"train": {"path": "train.csv", "keyed_sha256": "0" * 64}}
    document["split"] = {"salt": "s", "test_fraction": 0.3}
    return DataCard.model_validate_json(json.dumps(document))

"""What is known of a run before it starts."""

import json
from typing import Any

import pytest

from data.card import DataCard
from tasks.preflight.preview import held_out_people
from tests.support.cards import card, csv_of, label, number

ID = {"name": "id", "kind": "ignored"}


@pytest.mark.parametrize(
    ("person", "people"),
    [
        (None, 500),
        ({"column": "id"}, 500),
        ({"column": "id", "per_person": 4}, 125),
        ({"column": "id", "per_person": 4, "group_privacy": True}, 500),
    ],
)
def test_records_that_count_as_one_person_are_one_person_held_out(
    person: dict[str, Any] | None, people: int
) -> None:
    declared = card(
        "visits",
        holdout="private",
        classes=["no", "yes"],
        records={"at_most": 2000},
        files={"train": {"path": "visits.csv", "sha256": "0" * 64}},
        split={"salt": "visits", "test_fraction": 0.25},
        reader=csv_of(ID, number("age", 0, 100), label("returned")),
        **({} if person is None else {"person": person}),
    )
    assert held_out_people(DataCard.model_validate_json(json.dumps(declared))) == people

"""Where a card protects people, and a column that nothing uses is named like their id, somebody asks."""

from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from data.card import DataRefusedError, data_card
from tasks.card_questions import are_people, is_like_an_id, questions_about
from tests.support.cards import card, category, csv_of, label, number
from tests.support.refusals import refused_as

ID = {"name": "patient_id", "kind": "ignored"}
CARD = card(
    "mine",
    holdout="private",
    records={"at_most": 400},
    classes=["no", "yes"],
    split={"salt": "m", "test_fraction": 0.5},
    files={"train": {"path": "t.csv", "keyed_sha256": "0" * 64}},
    reader=csv_of(ID, number("x", 0, 1), label("y")),
)


@pytest.mark.parametrize(
    ("changes", "is_asked"),
    [
        ({}, True),
        ({"unit": "one patient of the clinic"}, True),
        ({"unit": "one visit"}, False),
        ({"person": {"column": "patient_id"}}, False),
        ({"reader": csv_of(ID | {"name": "notes"}, number("x", 0, 1), label("y"))}, False),
        ({"reader": csv_of(number("patient_id", 0, 2.0**60), label("y"))}, True),
        ({"reader": csv_of({"name": "patient_id", "kind": "hashed", "cells": 8}, label("y"))}, True),
        ({"reader": csv_of(number("patients", 0, 9), category("id", "a", "b"), label("y"))}, False),
    ],
)
def test_a_person_is_asked_about_where_the_card_leaves_it_open(
    tmp_path: Path, changes: dict[str, Any], is_asked: bool
) -> None:
    YAML(typ="safe", pure=True).dump(CARD | changes, tmp_path / "mine.yaml")
    asked = questions_about(data_card("mine", tmp_path))
    assert [("'patient_id'" in one, "per_person: K" in one) for one in asked] == [(True, True)] * is_asked


@pytest.mark.parametrize(
    ("changes", "is_asked"),
    [
        ({}, False),
        ({"holdout": "public"}, True),
        ({"holdout": "public", "holdout_why": "the records are invented"}, False),
    ],
)
def test_why_held_out_people_are_not_protected_is_asked(
    tmp_path: Path, changes: dict[str, Any], is_asked: bool
) -> None:
    without_id = CARD | {"reader": csv_of(number("x", 0, 1), label("y"))}
    YAML(typ="safe", pure=True).dump(without_id | changes, tmp_path / "mine.yaml")
    asked = questions_about(data_card("mine", tmp_path))
    assert ["why are the held-out records public" in one for one in asked] == [True] * is_asked


@pytest.mark.parametrize(
    "changes",
    [
        {"public": True, "holdout": "private"},
        {"public": True, "holdout": "public", "holdout_why": "they are public"},
        {"holdout": "private", "holdout_why": "they are invented"},
    ],
)
def test_a_holdout_that_does_not_fit_its_records_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    YAML(typ="safe", pure=True).dump(CARD | changes, tmp_path / "mine.yaml")
    with refused_as("bad_card", DataRefusedError):
        data_card("mine", tmp_path)


def test_names_of_ids_and_units_that_are_people_are_told_from_others() -> None:
    ids = (
        "id",
        "ID",
        "user_id",
        "userId",
        "PatientNo",
        "customer number",
        "SSN",
        "e-mail",
        "member",
        "uuid",
        "clients",
    )
    others = (
        "width",
        "paid",
        "idle",
        "notes",
        "userland",
        "age",
        "video",
        "period",
        "management",
        "patient_age",
        "valid",
    )
    assert [name for name in (*ids, *others) if is_like_an_id(name)] == list(ids)
    assert are_people("one person") and are_people("all rows of one Customer") and are_people("two women")
    assert not any(map(are_people, ("one record", "one house", "one manual", "one useradd")))

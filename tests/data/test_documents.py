"""YAML of people: what has no bottom or no meaning is refused in one sentence."""

from pathlib import Path

import pytest

from data.card import DataRefusedError, data_card
from data.documents import DocumentError, load_yaml
from tasks.config import params
from tests.support.refusals import refused_as

UNUSABLE = {
    "lists in lists": ("[" * 1200, "too_deep"),
    "lists below lists": ("- " * 100_000 + "x", "too_deep"),
    "itself": ("a: &a [*a]", "too_deep"),
    "a date that is none": ("a: 2020-13-45", "bad_value"),
    "a number without end": ("a: " + "9" * 5000, "bad_value"),
    "a number without end in hexadecimal": ("a: 0x" + "f" * 5000, "large_number"),
    "a number without end as a key": ("? 0x" + "f" * 5000 + "\n: 1", "large_number"),
    "bytes": ("a: !!binary aGVsbG8=", "not_of_json"),
    "a set": ("a: [!!set {b}]", "not_of_json"),
    "a list as a key": ("a: {[b]: 1}", "not_of_json"),
    "no YAML": ("a: [", "not_yaml"),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_yaml_without_bottom_or_meaning_is_refused_in_params_and_cards(name: str, tmp_path: Path) -> None:
    text, fault = UNUSABLE[name]
    for file in ("mine.yaml", "params.yaml"):
        (tmp_path / file).write_text(text)
    with pytest.raises(DocumentError) as refusal:
        load_yaml(text)
    assert refusal.value.code == fault
    if name in ("itself", "no YAML"):  # all go the same way
        with refused_as("unreadable_file", DataRefusedError, path=tmp_path / "mine.yaml", fault=fault):
            data_card("mine", tmp_path)
        with pytest.raises(params.ParamsRefusedError):
            params.load(tmp_path / "params.yaml", reads=("data",))


def test_aliases_and_merges_mean_what_they_say() -> None:
    text = "a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}\nc: [*a, *a]\nd: ~\n"
    x = {"x": 1, "y": 2}
    assert load_yaml(text) == {"a": x, "b": {"x": 1, "y": 3}, "c": [x, x], "d": None}
    assert load_yaml("a: 2026-01-31\n2026-01-30: ") == {"a": "2026-01-31", "2026-01-30": None}
    assert load_yaml("") is None and load_yaml("5") == 5


def test_what_a_caller_does_to_a_document_is_its_own_affair() -> None:
    """Equal texts are parsed once."""
    text = "space: {steps: [1, 2]}"
    load_yaml(text)["space"]["steps"].append(3)
    assert load_yaml(text) == {"space": {"steps": [1, 2]}}

"""YAML of people: what has no end, no bottom or no meaning is refused in one sentence, and at once."""

from pathlib import Path

import pytest

from data.card import DataRefusedError, data_card
from data.documents import DocumentError, load_yaml
from tasks.config import params


def bomb(form: str) -> str:
    """Ten of ten of ten ..., 10^12 values in a few hundred characters."""
    lines = ["a0: &a0 {k: v}"]
    lines += [f"a{n}: &a{n} {form.replace('ALL', ', '.join([f'*a{n - 1}'] * 10))}" for n in range(1, 13)]
    return "\n".join(lines)


UNUSABLE = {
    "aliases": (bomb("[ALL]"), "more than 1,000,000 values"),
    "merged aliases": (bomb("{<<: [ALL]}"), "more than 1,000,000 values"),
    "lists in lists": ("[" * 1200, "deeper than 50 levels"),
    "lists below lists": ("- " * 100_000 + "x", "deeper than 50 levels"),
    "deep by aliases": (
        "a0: &a0 [x]\n" + "\n".join(f"a{n}: &a{n} [*a{n - 1}]" for n in range(1, 100)),
        "deeper than 50 levels",
    ),
    "itself": ("a: &a [*a]", "within that part"),
    "a date that is none": ("a: 2020-13-45", "another value that is none"),
    "a number without end": ("a: " + "9" * 5000, "another value that is none"),
    "a number without end in hexadecimal": ("a: 0x" + "f" * 5000, "number of more than 1000 bits"),
    "a number without end as a key": ("? 0x" + "f" * 5000 + "\n: 1", "number of more than 1000 bits"),
    "bytes": ("a: !!binary aGVsbG8=", "no text, number, list or mapping"),
    "a set": ("a: [!!set {b}]", "no text, number, list or mapping"),
    "a list as a key": ("a: {[b]: 1}", "a list or a mapping as a key"),
    "too long": ("#" + "x" * 2**23, "longer than 8,388,608 characters"),
    "no YAML": ("a: [", "is not valid YAML near line 1"),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_yaml_without_end_or_bottom_is_refused_in_params_and_cards(name: str, tmp_path: Path) -> None:
    text, why = UNUSABLE[name]
    for file in ("mine.yaml", "params.yaml"):
        (tmp_path / file).write_text(text)
    with pytest.raises(DocumentError, match=why):
        load_yaml(text)
    if name in ("merged aliases", "too long"):  # all go the same way
        with pytest.raises(DataRefusedError, match=why):
            data_card("mine", tmp_path)
        with pytest.raises(params.ParamsRefusedError, match=why):
            params.load(tmp_path / "params.yaml", reads=("data",))


def test_aliases_and_merges_within_bounds_mean_what_they_say() -> None:
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

"""Comparisons of what is no class: a number, several labels, next tokens and tags, each by its own metric."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ruamel.yaml import YAML

from tasks.comparing.report import report, results
from tests.support.cards import card, csv_of, number
from tests.support.comparisons import document, run_here, small
from tests.support.public_texts import publish

CARD = card("mine", public=True, records={"train": 120, "test": 80})
TABLE = {
    "number": ({"target": {"bounds": [0, 10]}}, ["sum"], "r2"),
    "labels": ({"target": {"labels": ["big", "odd"]}}, ["big", "odd"], "micro_f1"),
}


def declare(root: Path, ending: str, lines: list[str], head: tuple[str, ...] = (), **keys: Any) -> None:
    """A card of public records, the first 120 of them to train on."""
    files = {}
    for name, some in (("train", lines[:120]), ("test", lines[120:])):
        path = root / f"{name}.{ending}"
        path.write_text("\n".join([*head, *some]) + "\n")
        files[name] = {"path": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    YAML(typ="safe", pure=True).dump(CARD | {"files": files} | keys, root / "data/cards/mine.yaml")


def compared(root: Path, problem: dict[str, Any], **keys: Any) -> Any:
    """A comparison on one problem: its table of results, and what its page shows."""
    content = document() | {"problems": [problem], "epsilons": [2.0]} | keys
    work = run_here(root, content)
    done = report(work, refused=[])
    return results(work.place, work.cells), done, (work.place.folder / "report.html").read_text()


@pytest.mark.parametrize(("kind", "folds"), [("number", {"k": 2}), ("labels", None)])
def test_a_number_and_labels_are_compared(tmp_path: Path, kind: str, folds: dict[str, Any] | None) -> None:
    root = small(tmp_path / "checkout")
    draw = np.random.default_rng(0).random((200, 2)).round(3)
    rows = [f"{a},{b},{5 * (a + b):.3f},{int(a > 0.5)},{int(b > 0.7)}" for a, b in draw]
    target, labels, headline = TABLE[kind]
    others = ({"name": n, "kind": "label" if n in labels else "ignored"} for n in ("sum", "big", "odd"))
    reader = csv_of(number("a", 0, 1), number("b", 0, 1), *others)
    declare(root, "csv", rows, ("a,b,sum,big,odd",), reader=reader, **target)
    more = {} if folds is None else {"folds": folds}
    table, done, page = compared(root, {"dataset": "mine", "model": "linear"}, **more)
    assert table[headline].notna().all() and "accuracy" not in table
    assert set(done.pictures) >= {headline, "objective"}
    assert f"{headline}_mean" in done.totals and "Accuracy" not in page
    plain = table[table["method"] == "plain"][headline]
    assert (plain > 0).all()  # five steps without noise are better than nothing


@pytest.mark.parametrize(
    ("target", "headline"),
    [
        ({"next": "token"}, "token_accuracy"),
        ({"tags": ["O", "B-WHO", "I-WHO"], "outside": "O", "words": 4}, "entity_f1"),
    ],
)
def test_next_tokens_and_tags_are_compared(tmp_path: Path, target: dict[str, Any], headline: str) -> None:
    root, public = small(tmp_path / "checkout"), tmp_path / "public"
    publish(public, causal="next" in target)
    lines = [{"text": "a good film", "tags": [n % 2, 0, len(target) % 2]} for n in range(200)]
    reader = {"kind": "texts", "format": "jsonl", "columns": ["text"]}
    reader |= {} if "next" in target else {"label": "tags"}
    declare(root, "jsonl", list(map(json.dumps, lines)), reader=reader, target=target)
    encoder = {"name": f"tokenizer/{public}", "settings": {"length": 6}}
    own = {"checkpoint": str(public), "adapter": {"rank": 2}}
    problem = {"dataset": "mine", "model": "huggingface", "model_settings": own, "transform": "encoder"}
    problem["encoder"] = encoder
    table, done, _ = compared(root, problem)
    assert table[headline].notna().all() and "accuracy" not in table
    assert table["test_loss"].notna().all() and table["objective"].notna().all()
    assert set(done.pictures) >= {headline, *(["perplexity"] if "next" in target else [])}
    if "next" in target:
        np.testing.assert_allclose(table["perplexity"], np.exp(table["test_loss"]))

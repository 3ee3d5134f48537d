"""What leaves a run beside its noisy answers is the same for neighbouring data sets, byte for byte.

The answers are noise alone here: what the records add is left out. All that then differs between two data sets would
tell of their records without being paid for.
"""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as parquet
import pytest
import torch
from ruamel.yaml import YAML
from torch import Tensor

from algorithms.privacy.mechanisms import noise, release
from algorithms.privacy.mechanisms.noise import Generator, Stream
from data.card import File
from data.files import checksum_for, owner_key
from tasks import evaluate, report
from tasks.runs import charge, store
from tests.support.cards import card, category, csv_of, label, number
from tests.support.workspace import Workspace

HEADER = "income,town,job,seen,age,who,back"
READER = csv_of(
    number("income", 0, 1000) | {"missing": 0.0},
    category("town", "Rome", "Oslo"),
    {"name": "job", "kind": "hashed", "cells": 8},
    {"name": "seen", "kind": "timestamp", "bounds": ["2019-01-01", "2021-12-31"]},
    {"name": "age", "kind": "binned", "edges": [20, 40], "missing": "zeros"},
    {"name": "who", "kind": "ignored"},
    label("back"),
)
CARD = card(
    "clinic",
    holdout="private",
    records={"at_most": 400},
    classes=["no", "yes"],
    reader=READER | {"cells": {"grids": [4], "trees": 4, "depth": 2, "seed": 1}},
    files={"train": {"path": "rows.csv", "keyed_sha256": "0" * 64}},
    split={"salt": "clinic", "test_fraction": 0.3, "copies": "apart"},
)
RUN: dict[str, Any] = {
    "data": {"dataset": "clinic"},
    "privacy": {"epsilon": 3.0, "delta": 1e-5},
    "features": {"name": "histograms"},
    "algorithm": {"name": "dp_sgd", "sampling_rate": 0.2, "steps": 3},
    "model": {"name": "additive"},
}
ODD = {
    "extreme": "1e300,Rome,a,2020-01-01,30,p,no",
    "negative": "-1e300,Rome,a,2020-01-01,-1e9,p,no",
    "missing": ",,,,,,yes",
    "unknown": "0.5,Atlantis,a,1850-01-01,30,p,no",
    "long": f"1,Oslo,{'ä中' * 2000},2020-02-30T25:00,30,p,yes",
    "quoted": '1,Rome,"a ""b"", c",2020-01-01T10:00+01:00,30,"p,q",no',
}


def rows(count: int) -> list[str]:
    draw = np.random.default_rng(0)
    return [
        f"{draw.integers(1000)},{draw.choice(['Rome', 'Oslo'])},j{draw.integers(20)},2020-0{draw.integers(1, 9)}-11,"
        f"{draw.integers(90)},p{place},{draw.choice(['no', 'yes'])}"
        for place in range(count)
    ]


def all_that_leaves(place: Workspace, lines: list[str], patch: pytest.MonkeyPatch) -> dict[str, str]:
    """Prepares, trains, evaluates and reports on these rows; the files by name, without hashes of a time and a key."""
    root = place.root
    (root / "data/cards").mkdir(parents=True)
    (root / "rows.csv").write_text("\n".join([HEADER, *lines]) + "\n")
    declared = File(path="rows.csv", keyed_sha256="0" * 64)
    checksum = (checksum_for(root / "rows.csv", declared, key=owner_key(place.home)) or "").split()[1]
    document = CARD | {"files": {"train": {"path": "rows.csv", "keyed_sha256": checksum}}}
    YAML(typ="safe", pure=True).dump(document, root / "data/cards/clinic.yaml")
    patch.chdir(root)
    patch.setenv("EPSILONFLOW_HOME", str(place.home))
    place.prepare("clinic")
    place.write(RUN)
    place.train()
    evaluate.main()
    report.report(artifacts=root / "artifacts", prepared=root / "datasets/prepared", root=root)
    sizes = {path.name: path.stat().st_size for path in (root / "datasets/prepared").iterdir()}
    found = {"size of the prepared folder": str(sum(sizes.values())), "its files": str(sorted(sizes))}
    found["public.json"] = (root / "datasets/prepared/public.json").read_text()
    for path in sorted((root / "artifacts").rglob("*")):
        if path.is_file():
            content = path.read_bytes().decode("latin-1")
            if path.suffix == ".parquet":
                table = parquet.read_table(path)
                content = f"{table.schema}{table.to_pydict()}{len(content)}"
            found[path.name] = content
    signature, ledger = json.loads(found["privacy_card.json"])["signature"], place.receipt["ledger"]
    for own in (*signature.values(), ledger["first"], ledger["head"]):  # of another time, and another key
        found = {name: content.replace(own, "(own)") for name, content in found.items()}
    return found


@pytest.fixture
def noise_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums are zero, and their noise is drawn from the first word of their stream, whatever coins came before."""
    add, draws = noise.add_steps, release.draws

    def add_to_nothing(total: Tensor, steps: Tensor, *, std: float) -> Tensor:
        return add(torch.zeros_like(total), steps, std=std)

    def draw_from_the_first(asked: release.Release, stream: Stream, count: int) -> Any:
        return draws(asked, Stream(stream._key, stream._release), count)

    monkeypatch.setattr(release, "add_steps", add_to_nothing)
    monkeypatch.setattr(release, "draws", draw_from_the_first)
    monkeypatch.setattr(charge, "generator_of", lambda *_: Generator(bytes(32), private=True))
    monkeypatch.setattr(store, "digest", lambda *_, **__: "0" * 16)  # keyed, and another for other records


def test_nothing_but_the_noisy_answers_depends_on_the_records(
    noise_alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of other records, in another order and number, with values of every kind that a card does not expect."""
    some, found = rows(300), []
    for name, lines in {"some": some, "odd": [*ODD.values(), *some[:3], *some[-40:0:-1]]}.items():
        place = Workspace(tmp_path / name, tmp_path / f"{name}-home")
        for folder in (place.root, place.home):
            folder.mkdir(mode=0o700)
        found.append(all_that_leaves(place, lines, monkeypatch))
    one, other = found
    assert one.keys() == other.keys() and len(one) > 15
    assert [name for name in one if one[name] != other[name]] == []
    assert not [name for name in other if re.search("Atlantis|1e300|中", other[name])]

"""What leaves a run beside its noisy answers is the same for neighbouring data sets, byte for byte.

The answers are noise alone here: what the records add is left out. All that then differs between two data sets would
tell of their records without being paid for.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as parquet
import pytest
import torch
from ruamel.yaml import YAML
from torch import Tensor

from algorithms.privacy.mechanisms import noise, release_noise
from algorithms.privacy.mechanisms.noise import Generator, Stream
from algorithms.privacy.mechanisms.release import Release
from data.card import File
from data.files import checksum_for, owner_key
from tasks import evaluate, report
from tasks.runs import charge, store
from tasks.tuning.search import Search, tune
from tasks.tuning.search_plan import plan_search
from tasks.tuning.settings import Tuning
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
    reader=READER | {"cells": {"grids": [4], "trees": 4, "depth": 2, "seed": 1, "constant_share": 0.1}},
    files={"train": {"path": "rows.csv", "keyed_sha256": "0" * 64}},
    split={"salt": "clinic", "test_fraction": 0.3, "copies": "apart"},
)
RUN: dict[str, Any] = {
    "data": {"dataset": "clinic"},
    "privacy": {"epsilon": 3.0, "delta": 1e-5},
    "features": {"name": "histograms", "splits": "by_content"},
    "algorithm": {"name": "dp_sgd", "sampling_rate": 0.2, "steps": 3},
    "model": {"name": "additive"},
}
SHRUNK = RUN | {
    "features": {"name": "none"},
    "algorithm": RUN["algorithm"] | {"shrink_share": 0.05, "update": {"noise_limit": 0.5}},
}
PUBLIC = {"holdout": "public", "holdout_why": "Of volunteers.", "split": None}
"""With held-out records of a file of their own, which is declared public."""
PEOPLE = {
    "person": {"column": "who", "per_person": 3},
    "split": {"salt": "clinic", "test_fraction": 0.3},
}
"""Of whom each has two rows, or in the other data one of them six, of which three are kept."""
NUMBER = {"classes": None, "target": {"bounds": [0, 100]}}
"""With a number in the place of each class."""
SCALED = SHRUNK | {
    "features": RUN["features"] | {"mean_noise": 20.0},
    "algorithm": SHRUNK["algorithm"] | {"error_share": 0.05},
}
"""The number's mean is released, too, and how far its errors have fallen."""
SPACE = {"algorithm.update.learning_rate": [0.5, 2.0]}
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
        f"{draw.integers(90)},p{place // 2},{draw.choice(['no', 'yes'])}"
        for place in range(count)
    ]


def prepare_rows(
    place: Workspace, lines: list[str], patch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> dict[str, str]:
    """Prepares these rows; what is public of them by name, in a workspace that is the current folder."""
    root = place.root
    (root / "data/cards").mkdir(parents=True)
    for part, some in {"train": lines, "test": rows(80)[20:]}.items():
        (root / f"{part}.csv").write_text("\n".join([HEADER, *some]) + "\n")
    file = File(path="train.csv", keyed_sha256="0" * 64)
    checksum = (checksum_for(root / file.path, file, key=owner_key(place.home)) or "").split()[1]
    declared = {
        "train": {"path": file.path, "keyed_sha256": checksum},
        "test": {"path": "test.csv", "sha256": hashlib.sha256((root / "test.csv").read_bytes()).hexdigest()},
    }
    document = CARD | changes
    parts = ("train", "test") if document["split"] is None else ("train",)
    document |= {"files": {part: declared[part] for part in parts}}
    kept = {name: value for name, value in document.items() if value is not None}
    YAML(typ="safe", pure=True).dump(kept, root / "data/cards/clinic.yaml")
    patch.chdir(root)
    patch.setenv("EPSILONFLOW_HOME", str(place.home))
    place.prepare("clinic")
    sizes = {path.name: path.stat().st_size for path in (root / "datasets/prepared").iterdir()}
    return {
        "size of the prepared folder": str(sum(sizes.values())),
        "its files": str(sorted(sizes)),
        "public.json": (root / "datasets/prepared/public.json").read_text(),
    }


def run(place: Workspace, asked: dict[str, Any], **evaluation: str) -> dict[str, str]:
    """Trains, evaluates and reports; the artifacts by name."""
    root = place.root
    place.write(asked | {"privacy": RUN["privacy"] | ({"evaluation": evaluation} if evaluation else {})})
    place.train()
    evaluate.main()
    report.report(artifacts=root / "artifacts", prepared=root / "datasets/prepared", root=root)
    return left_in(root / "artifacts", place.receipt)


def search_rates(place: Workspace, base: dict[str, Any], on: str) -> dict[str, str]:
    """Searches for a learning rate; what it leaves by name."""
    asked = Tuning.model_validate({"space": SPACE, "epsilon": 3.0, "objective": {"on": on}})
    planned = plan_search(asked, base, place.info)
    search = Search(asked, planned, place.root / "datasets/prepared", place.info)
    receipt = tune(search, ledger=place.ledger, home=place.home, root=place.root)
    return left_in(place.root / "tuned", json.loads(receipt.model_dump_json()))


def left_in(folder: Path, receipt: dict[str, Any]) -> dict[str, str]:
    """The files of a folder by name, without hashes of a time and a key."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            content = path.read_bytes().decode("latin-1")
            if path.suffix == ".parquet":
                table = parquet.read_table(path)
                content = f"{table.schema}{table.to_pydict()}{len(content)}"
            found[path.name] = content
    signature, ledger = json.loads(found["privacy_card.json"])["signature"], receipt["ledger"]
    for own in (*signature.values(), ledger["first"], ledger["head"]):  # of another time, and another key
        found = {name: content.replace(own, "(own)") for name, content in found.items()}
    return found


@pytest.fixture
def noise_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums are zero, and their noise is drawn from the first word of their stream, whatever coins came before."""
    add, draws = noise.add_steps, release_noise.draws

    def add_to_nothing(total: Tensor, steps: Tensor, *, std: float) -> Tensor:
        return add(torch.zeros_like(total), steps, std=std)

    def draw_from_the_first(asked: Release, stream: Stream, count: int) -> Any:
        return draws(asked, Stream(stream._key, stream._release), count)

    monkeypatch.setattr(release_noise, "add_steps", add_to_nothing)
    monkeypatch.setattr(release_noise, "draws", draw_from_the_first)
    monkeypatch.setattr(charge, "generator_of", lambda *_: Generator(bytes(32), private=True))

    def of_settings(decides: Sequence[object], *_: object, **__: object) -> str:
        """In place of a digest that is keyed, and another for other records."""
        return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:16]

    monkeypatch.setattr(store, "digest", of_settings)


def all_that_leaves(place: Workspace, kind: str) -> dict[str, dict[str, str]]:
    """By what is done: a run, or another one of it or compared with it, or searches."""
    if kind == "search":
        return {on: search_rates(place, base, on) for on, base in (("held_out", RUN), ("private", SHRUNK))}
    asked = {"public": SHRUNK, "number": SCALED}.get(kind, RUN)
    found = {"run": run(place, asked)}
    if kind == "people":
        found["shrunk"] = run(place, SHRUNK)
    if kind == "private":
        model = place.root / "before.safetensors"
        shutil.copyfile(place.root / "artifacts/model.safetensors", model)
        found["compared"] = run(place, RUN, compare_with=model.name)
    return found


@pytest.mark.usefixtures("noise_alone", "log_to_pytest_alone")
@pytest.mark.parametrize("kind", ["private", "people", "number", "public", "search"])
def test_nothing_but_the_noisy_answers_depends_on_the_records(
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Of other records, in another order and number, with values of every kind that a card does not expect.

    kind: who is held out, or a search with private people held out.
    """
    caplog.set_level("INFO")
    some, found = rows(300), []
    for name, lines in {"some": some, "odd": [*ODD.values(), *some[:3], *some[-40:0:-1]]}.items():
        place = Workspace(tmp_path / name, tmp_path / f"{name}-home")
        for folder in (place.root, place.home):
            folder.mkdir(mode=0o700)
        changes = {"public": PUBLIC, "people": PEOPLE, "number": NUMBER}.get(kind, {})
        if kind == "number":
            lines = [re.sub("yes$", "37.5", re.sub("no$", "-1e9", line)) for line in lines]
        public = prepare_rows(place, lines, monkeypatch, changes)
        left = all_that_leaves(place, kind)
        # Not how far a run has come, which is logged now and then.
        logged = [
            record.getMessage()
            for record in caplog.records
            if record.name.split(".")[0] in ("algorithms", "data", "tasks")
        ]
        written = "".join(capfd.readouterr()).splitlines()
        logged, output = (
            [line for line in lines if not re.search(r"step [0-9]+ of", line)] for lines in (logged, written)
        )
        assert kind == "search" or "training ..." in logged
        printed = {"log": str(logged), "output": str(output)}
        caplog.clear()
        found.append({"prepared": public, "printed": printed} | left)
    assert found[0].keys() == found[1].keys()
    for what, one in found[0].items():
        other = found[1][what]
        assert one.keys() == other.keys() and (len(one) > 6 or what in ("prepared", "printed"))
        assert [name for name in one if one[name] != other[name]] == [], what
        assert not [name for name in other if re.search("Atlantis|1e300|中", other[name])]

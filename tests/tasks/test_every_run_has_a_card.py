"""What is charged ends with a card: every method with every value of every choice, from the records to `card verify`.

A method joins by being in the catalogue. Each value of each choice is in some run of each method that allows it, with
as few other choices as it needs; a run that calibration lets through has to end with a card that holds.
"""

import hashlib
import json
import re
import shutil
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
import pytest
from ruamel.yaml import YAML
from safetensors.torch import save_file

from algorithms.core import calibration
from algorithms.errors import RefusedError
from algorithms.features import FEATURES
from algorithms.methods import CATALOGUE
from algorithms.privacy.accounting import epsilon
from algorithms.privacy.accounting.epsilon import ACCOUNTANTS
from algorithms.privacy.accounting.filters import FIXED
from algorithms.privacy.accounting.risk import Profile, risk_profile
from algorithms.privacy.card import CardVerification, check_charged, load, verify, verify_card
from algorithms.privacy.card.text import SO_FAR
from algorithms.privacy.documents import PlanDocument
from algorithms.privacy.ledger import WHOLE_POPULATION, Ledger
from data import DatasetInfo
from data.card import CARDS as SHIPPED
from data.card import data_card
from data.files import public_key
from tasks import calibrate, evaluate, model_building, prepare, report, train
from tasks.config import params
from tasks.config.overrides import recipe
from tasks.reporting.figures import Picture
from tests.support.cards import card, category, csv_of, label, number
from tests.support.soak import soak_but

RECORDS, TEST_RECORDS, STEPS = 120, 30, 2
TABLE: dict[str, Any] = {
    "cap": {"epsilon": 100.0, "delta": 1e-2},
    "classes": ["no", "yes"],
    "reader": csv_of(number("age", 0, 100), number("height", 0, 2), label("answer")),
}
FILES = ("train", "test")
SPLIT = {"salt": "tiny", "test_fraction": 0.3}
CARDS: dict[str, dict[str, Any]] = {
    "public": {"public": True, "records": {"train": RECORDS, "test": TEST_RECORDS}, "files": FILES},
    "private": {
        "records": {"at_most": 500},
        "files": ("train",),
        "split": SPLIT,
        "composition": {"kind": "zcdp"},
    },
    "blocks": {
        "records": {"at_most": 500},
        "blocks": {"kind": "folder", "path": "blocks"},
        "split": SPLIT,
        "composition": {"kind": "renyi", "order": 6.0},
        "blocks_per_person": 2,
    },
    "a number": {
        "records": {"at_most": 500},
        "files": ("train",),
        "split": SPLIT,
        "classes": [],
        "target": {"bounds": [0, 2]},
        "reader": csv_of(number("age", 0, 100), label("height"), category("answer", "no", "yes")),
    },
    "private, counted": {
        "records": {"train": RECORDS, "test": TEST_RECORDS},
        "files": FILES,
    },
}
PURE = {"heavy_ball", "nesterov", "objective_perturbation"}
"""Methods that are known to have releases of pure differential privacy."""
UNREPORTED = "could not be reported"
"""What the refusal of a run says whose card could not be written."""
Choices = Mapping[str, Any]
"""By the name of a choice, what is chosen otherwise than usual; that of a setting begins with "algorithm."."""
USUAL: dict[str, Any] = {
    "data": "public",
    "accountant": "rdp",
    "features": "none",
    "noise": "secure",
    "diagnostics": False,
    "start": False,
    "model": None,
}
CARD_OF = cache(data_card)
FEATURE_SETTINGS = {"principal_components": {"components": 2}, "whitened": {"groups": 0}}


@dataclass(frozen=True)
class Made:
    """Prepared data: folders by the name of their card, and the home that they were prepared with."""

    prepared: Path
    home: Path
    cards: Path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    root = tmp_path_factory.mktemp("made")
    place = Made(root / "prepared", root / "home", root / "data/cards")
    for folder in (place.home, place.cards, root / "files", root / "blocks", place.prepared):
        folder.mkdir(parents=True)
    for seed, (name, count) in enumerate((("files/train", RECORDS), ("files/test", TEST_RECORDS))):
        _write_table(root / f"{name}.csv", seed, count)
    for seed, name in enumerate(("january", "february")):
        _write_table(root / f"blocks/{name}.csv", 5 + seed, RECORDS)
    shutil.copy(SHIPPED / "digits.yaml", place.cards)
    for name, keys in CARDS.items():
        own = keys | {"files": {role: _file(root, role) for role in keys.get("files", ())}}
        document = card(_dataset(name), **TABLE | own)
        YAML(typ="safe", pure=True).dump(document, place.cards / f"{_dataset(name)}.yaml")
    for name in (*CARDS, "images"):
        settings = params.parse({"data": {"dataset": _dataset(name)}}, reads=prepare.READS)
        prepare.prepare(
            settings,
            mirror=None,
            home=place.home,
            destination=place.prepared / name,
            root=root,
            cards=place.cards,
        )
    return place


def _file(root: Path, role: str) -> dict[str, str]:
    path = f"files/{role}.csv"
    return {"path": path, "sha256": hashlib.sha256((root / path).read_bytes()).hexdigest()}


def _dataset(name: str) -> str:
    return "digits" if name == "images" else name.replace(", ", "-").replace(" ", "-")


def _write_table(path: Path, seed: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    ages, heights = rng.integers(0, 101, count), rng.random(count) * 2
    rows = (f"{a},{h:.3f},{'yes' if a > 50 else 'no'}" for a, h in zip(ages, heights, strict=True))
    path.write_text("\n".join(["age,height,answer", *rows]) + "\n")


def choices_of(name: str) -> Iterator[tuple[str, Any]]:
    """Every value of every choice of a method; of a setting with a few possible values each of them."""
    yield from (("data", kind) for kind in (*CARDS, "images"))
    yield from (("accountant", accountant) for accountant in ACCOUNTANTS)
    yield from (("features", features) for features in ("none", *FEATURES))
    yield from (("noise", "seeded"), ("diagnostics", True), ("start", True), ("model", "softmax"))
    hints = get_type_hints(CATALOGUE[name], include_extras=True)
    for field in fields(CATALOGUE[name]):
        for kind in (hints[field.name], *get_args(hints[field.name])):
            values = get_args(kind) if get_origin(kind) is typing.Literal else ()
            yield from ((f"algorithm.{field.name}", value) for value in values)
        if hints[field.name] is bool:
            yield from ((f"algorithm.{field.name}", value) for value in (False, True))
        if field.name in ("batch_size", "expected_batch_size", "sampling_rate"):
            yield f"algorithm.{field.name}", 0.2 if field.name == "sampling_rate" else 20


class Runs:
    """The runs of a method in a folder of its own, each in a fresh home."""

    def __init__(self, name: str, made: Made, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.name, self.made, self.folder, self.patch = name, made, folder, monkeypatch
        self.calibrated = cache(self._calibrated)

    def plan(self, choices: Choices) -> PlanDocument | None:
        """The plan's document, or None where the choices are refused."""
        return self.calibrated(json.dumps(choices, sort_keys=True))

    def _calibrated(self, choices: str) -> PlanDocument | None:
        try:
            settings = params.parse(self.document(json.loads(choices)), reads=calibrate.READS)
            return calibrate.calibrate(settings, self.info(json.loads(choices)))
        except RefusedError:
            return None

    def info(self, choices: Choices) -> DatasetInfo:
        return DatasetInfo.read(self.prepared(choices))

    def prepared(self, choices: Choices) -> Path:
        return self.made.prepared / str(choices.get("data", "public"))

    def document(self, choices: Choices) -> dict[str, Any]:
        """params.yaml of these choices: the recipe with few steps."""
        chosen = USUAL | dict(choices)
        card = CARD_OF(self.info(choices).dataset, self.made.cards)
        usual = recipe(card, self.name, 1.0)
        own = {name.removeprefix("algorithm."): v for name, v in choices.items() if "algorithm." in name}
        short = {"steps": STEPS, "epochs": 1, "iterations": STEPS}
        settings = {name: short.get(name, v) for name, v in usual.settings.items()}
        own |= {"smoothness": 5.0} if own.get("smoothness_is_data_dependent") else {}
        settings |= {"steps": STEPS} if self.name == "sgd_ma" else {}
        # the paper's budget has a number of its own
        settings |= {"iterations": STEPS} if self.name == "dp_agd" and not own.get("paper_budget") else {}
        # of an image each round has more than a thousand candidates
        settings |= {"rounds": STEPS} if (self.name, chosen["data"]) == ("priv_gene", "images") else {}
        for one, other in (
            ("sampling_rate", "expected_batch_size"),
            ("expected_batch_size", "sampling_rate"),
        ):
            settings |= {other: None} if one in own and other in settings else {}
        accountant, features = chosen["accountant"], chosen["features"]
        document = {
            "data": {"dataset": card.name},
            "privacy": {
                "epsilon": 4.0,
                "delta": 0.0 if accountant == "pure" else 1e-5,
                "accountant": accountant,
                "noise": chosen["noise"],
                "diagnostics": chosen["diagnostics"],
            },
            "features": {"name": features} | FEATURE_SETTINGS.get(features, {}),
            "algorithm": {"name": self.name} | settings | own,
            "model": {"name": chosen["model"] or usual.model},
            "performance": {"threads": 1, "device": "cpu"},
            "tracking": {"mode": "disabled"},
        }
        if chosen["start"]:
            document["model"]["start"] = str(self._start(document, choices))
        return document

    def _start(self, document: dict[str, Any], choices: Choices) -> Path:
        kind = [choices.get(name) for name in ("data", "features", "model")]
        path = self.folder / f"start {kind}.safetensors"
        if not path.exists():
            settings = params.parse(document, reads=("model", "features"))
            model = model_building.model_for(settings, self.info(choices))
            save_file(
                {
                    name: t.contiguous()
                    for name, t in model.published_tensors(model.initial_parameters()).items()
                },
                path,
            )
        return path

    def card_of(self, choices: Choices) -> CardVerification | None:
        """What becomes of the card of a run; None where the population refuses it, to which nothing is charged then."""
        home, root = self.folder / "home", self.folder / "root"
        for folder in (home, root):
            shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.made.home, home)
        self.patch.setenv("EPSILONFLOW_HOME", str(home))
        artifacts, prepared = root / "artifacts", root / "datasets/prepared"
        artifacts.mkdir(parents=True)
        prepared.parent.mkdir()
        prepared.symlink_to(self.prepared(choices))
        document = self.plan(choices)
        assert document is not None
        (artifacts / "plan.json").write_text(document.to_text())
        YAML(typ="safe", pure=True).dump({}, root / "params.yaml")
        info, ledger = self.info(choices), Ledger.open(f"sqlite:///{home}/ledger.sqlite")
        settings = params.parse(self.document(choices), reads=train.READS)
        plan = (artifacts / "plan.json").read_bytes()
        job = train.Job(settings, plan, prepared, info, blocks=info.blocks or (WHOLE_POPULATION,))
        try:
            train.train(job, ledger=ledger, home=home, root=root, artifacts=artifacts)
        except RefusedError as refused:
            assert "reserve" not in [row.kind for row in ledger.history()]
            assert UNREPORTED not in str(refused)
            return None
        self.patch.chdir(root)
        evaluate.main()
        report.report(artifacts=artifacts, prepared=prepared, root=root)
        card = load(artifacts / report.CARD)
        check_charged(card, ledger)
        shows_what_is_chosen = document.filter != FIXED and card.setting.private
        assert (SO_FAR in (artifacts / report.PAGE).read_text()) is shows_what_is_chosen
        by_one_file = verify_card.verify(artifacts, key=public_key(home))
        assert [check for check in by_one_file if check[1] is False] == []
        return verify(card, artifacts, key=public_key(home))


def witness(runs: Runs, choice: str, value: Any, others: list[tuple[str, Any]]) -> dict[str, Any] | None:
    """The choices with which a value is let through: by itself, else with one other value."""
    alone = {} if USUAL.get(choice) == value else {choice: value}
    candidates = [alone, *({**alone, name: other} for name, other in others if name != choice)]
    return next((found for found in candidates if runs.plan(found) is not None), None)


def together(runs: Runs, wanted: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The wanted choices in as few runs as are let through, each wanted one in one of them."""
    merged: list[dict[str, Any]] = []
    for one in wanted:
        for index, other in enumerate(merged):
            both = other | one
            agree = all(other.get(name, value) == value for name, value in one.items())
            if agree and runs.plan(both) is not None:
                merged[index] = both
                break
        else:
            merged.append(one)
    return merged


RISKS = dict[str, Profile]()
"""By releases without their numbers: those of the page of one run are made, and shown on the pages of all like it."""


def risk_of_such_releases(*asked: Any) -> Profile:
    kind = re.sub(r"\d[\d.e+-]*", "", repr(asked))
    if kind not in RISKS:
        RISKS[kind] = risk_profile(*asked)
    return RISKS[kind]


WITH_EVERY_CHOICE = ("dp_sgd", "dp_agd", "objective_perturbation", "priv_gene")
"""Of each kind of price: of a schedule, of a filter, without delta, and of selections, which few populations take."""
OWN_CHOICES = [(name, name in WITH_EVERY_CHOICE) for name in CATALOGUE]


@pytest.mark.usefixtures("rehearsed_figures")
@pytest.mark.parametrize(
    ("name", "has_every_choice"),
    soak_but(OWN_CHOICES, [*OWN_CHOICES, *((name, True) for name, is_whole in OWN_CHOICES if not is_whole)]),
)
def test_whatever_is_charged_ends_with_a_card_that_holds(
    name: str, has_every_choice: bool, made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the choices that every method has, such as the data, by one method a kind of price; its own by each."""
    # The same noise for all, and little precision: the search for the least noise is long and not what is tested.
    monkeypatch.setattr(calibration, "calibrate", lambda *_, **__: 30.0)
    # kept for no other test
    monkeypatch.setattr(epsilon, "_epsilon", lru_cache(epsilon._epsilon.__wrapped__))
    monkeypatch.setattr(report, "picture", lambda _draw, words: Picture(b"wide", b"", words))
    monkeypatch.setattr(report, "risk_profile", risk_of_such_releases)
    runs, others = Runs(name, made, tmp_path, monkeypatch), list(choices_of(name))
    if not has_every_choice:
        shared = {("data", "public"), ("data", "private"), ("accountant", "pure"), ("model", "softmax")}
        # correlated noise, whose price is of all steps together, is charged to blocks, too
        shared |= {("data", "blocks")} if name == "matrix_factorisation" else set()
        others = [each for each in others if each[0].startswith("algorithm.") or each in shared]
    found = [witness(runs, choice, value, others) for choice, value in others]
    assert found[0] == {}
    if name in PURE:
        assert found[others.index(("accountant", "pure"))] is not None
    cards = [
        (choices, runs.card_of(choices))
        for choices in together(runs, [one for one in found if one is not None])
    ]
    failed = {str(choices): card.failures for choices, card in cards if card is not None and card.failures}
    assert not failed
    assert any(card is not None for _, card in cards)

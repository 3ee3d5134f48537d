"""Parts that are named package.module:factory: they train, and a change of their source is another run."""

import importlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from algorithms.extension import source_digest
from tasks import evaluate, train
from tasks.comparing.work import work_of
from tests.support.comparisons import document, run_here, small
from tests.support.refusals import refused_as
from tests.support.workspace import Workspace, killed_in

NETS = """
from torch import nn
from mypackage import sizes

def wide(given, width=sizes.WIDTH):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.Tanh(), nn.Linear(width, given.classes))

def number(given):
    return 3

def made(layer):
    return lambda given: nn.Sequential(nn.Flatten(), layer())

few = made(lambda: nn.Linear(64, 5))
long = made(lambda: nn.Linear(63, 10))
lazy = made(lambda: nn.LazyLinear(10))
double = made(lambda: nn.Linear(64, 10).double())
frozen = made(lambda: nn.Linear(64, 10).requires_grad_(False))

def broken(given):
    layer = nn.Linear(64, 10)
    nn.init.constant_(layer.weight, float("nan"))
    return nn.Sequential(nn.Flatten(), layer)

WIDTH = 3
"""
METHODS = """
from dataclasses import dataclass
from algorithms import DPSGD

@dataclass(frozen=True)
class Mine(DPSGD):
    extra: int = 1

def short(steps):
    return DPSGD(steps=steps, expected_batch_size=64)

def nothing():
    return 3
"""


@dataclass(frozen=True)
class Package:
    """The modules of a made-up package that can be imported."""

    folder: Path

    def write(self, name: str, text: str) -> None:
        (self.folder / f"{name}.py").write_text(text)
        importlib.invalidate_caches()
        for module in [module for module in sys.modules if module.partition(".")[0] == "mypackage"]:
            del sys.modules[module]


@pytest.fixture
def package(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Package]:
    place = tmp_path_factory.mktemp("own")
    monkeypatch.syspath_prepend(str(place))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    made = Package(place / "mypackage")
    made.folder.mkdir()
    for name, text in (("__init__", ""), ("sizes", "WIDTH = 8\n"), ("nets", NETS), ("methods", METHODS)):
        made.write(name, text)
    yield made
    made.write("__init__", "")


def plan(workspace: Workspace) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((workspace.root / "artifacts/plan.json").read_text())
    return document


def test_a_model_of_ones_own_is_planned_trained_and_evaluated(workspace: Workspace, package: Package) -> None:
    workspace.set("model", name="mypackage.nets:wide", settings={"width": 5})
    assert plan(workspace)["model"]["parameters"] == 65 * 5 + 6 * 10
    assert plan(workspace)["code"]["model"] == source_digest("mypackage.nets:wide")
    assert workspace.train()["epsilon"]["pld"] <= 3.0
    file = workspace.root / "artifacts/model.safetensors"
    model, _ = evaluate.load_model(file, allow_code=["mypackage.nets:wide"])
    assert (model.name, model.parameter_count) == ("mypackage.nets:wide", 65 * 5 + 6 * 10)


def test_a_method_of_ones_own_trains(workspace: Workspace, package: Package) -> None:
    """A function that makes it, or a dataclass with settings of its own."""
    workspace.set("algorithm", name="mypackage.methods:Mine", extra=2)
    assert workspace.train()["algorithm"] == "mypackage.methods:Mine"
    workspace.replace("algorithm", {"name": "mypackage.methods:short", "steps": 3})
    assert workspace.train()["steps"] == 3


def test_a_model_and_a_method_of_ones_own_are_compared_until_their_source_changes(
    tmp_path: Path, package: Package
) -> None:
    mine = {"algorithm": {"name": "mypackage.methods:short", "steps": 3}, "accountant": "rdp"}
    problem = {
        "dataset": "digits",
        "model": "mypackage.nets:wide",
        "model_settings": {"settings": {"width": 5}},
    }
    content = document() | {"problems": [problem], "epsilons": [4.0], "methods": {"mine": mine}}
    root, own = small(tmp_path / "checkout"), ("mypackage.methods:short", "mypackage.nets:wide")
    assert run_here(root, content, allow_code=own).unfinished_trials(renew=False) == []
    package.write("sizes", "WIDTH = 9\n")
    again = work_of(root / "comparisons/tiny.yaml", root, allow_code=own)
    assert len(again.unfinished_trials(renew=False)) == 1


def test_a_changed_source_is_refused_by_a_plan_made_before_and_is_another_run(
    workspace: Workspace, package: Package
) -> None:
    """Also where what changed is a module that the named one imports."""
    workspace.set("model", name="mypackage.nets:wide")
    workspace.train()
    package.write("sizes", "WIDTH = 8  # as before\n")
    with refused_as("stale_plan", differing="code"):
        workspace.train()
    workspace.set("privacy")
    workspace.train()
    assert [row.kind for row in workspace.ledger.history("digits")].count("reserve") == 2


def test_a_changed_module_beside_the_named_package_is_refused_before_a_resume(
    workspace: Workspace, package: Package
) -> None:
    beside = package.folder.parent / "sides.py"
    beside.write_text("WIDTH = 8\n")
    package.write("sizes", "from sides import WIDTH\n")
    workspace.set("model", name="mypackage.nets:wide")
    with killed_in(train, "run_training"):
        workspace.train()
    beside.write_text("WIDTH = 8  # as before\n")
    with refused_as("stale_plan", differing="code"):
        workspace.train()


def test_the_plan_holds_the_source_of_a_shipped_method(workspace: Workspace) -> None:
    assert plan(workspace)["code"] == {"algorithm": source_digest("algorithms.methods.dp_sgd")}


UNUSABLE = [
    ("model", "nopackage.nets:wide", "cannot be imported"),
    ("model", "mypackage.nets:narrow", "has no 'narrow'"),
    ("model", "mypackage.nets:WIDTH", "cannot be called"),
    ("model", "mypackage.nets:number", "made a int; return a Model"),
    (
        "model",
        "mypackage.nets:few",
        r"scores of the shape \[2, 5\] for 2 records, and the data have 10 classes",
    ),
    ("model", "mypackage.nets:long", r"does not take records of zeros of the shape \[1, 8, 8\]"),
    ("model", "mypackage.nets:lazy", "size is not known yet"),
    ("model", "mypackage.nets:double", "not float32"),
    ("model", "mypackage.nets:frozen", "no parameters to train"),
    ("model", "mypackage.nets:broken", "not finite"),
    ("model", "wide", "or name your own package.module:factory"),
    ("algorithm", "mypackage.methods:nothing", "has no plan"),
    ("algorithm", "mypackage.methods:absent", "has no 'absent'"),
    ("algorithm", "mine", "or name your own package.module:factory"),
    ("features", "mypackage.methods:absent", "has no 'absent'"),
    ("features", "mypackage.nets:wide", "features"),
]


def test_what_cannot_be_used_is_refused_in_a_sentence(workspace: Workspace, package: Package) -> None:
    path = workspace.root / "params.yaml"
    before = path.read_text()
    for group, name, words in UNUSABLE:
        with pytest.raises(ValueError, match=words):
            workspace.replace(group, {"name": name})
        path.write_text(before)

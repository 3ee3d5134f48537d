"""How a scheduled retraining ends where another home, a database or the checkout fails it."""

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from algorithms.errors import RefusedError
from algorithms.privacy.accounting import Budget
from algorithms.privacy.ledger import Ledger
from tasks import train
from tasks.retraining import Retraining, delivery
from tasks.retraining.registry import Registry, States
from tests.support.workspace import killed_in
from tests.tasks.test_retraining import SETTINGS, Place
from tests.tasks.test_retraining import place as place

KEY = "visits 2026-W02"


def elsewhere(place: Place, run_id: str = "elsewhere") -> None:
    """What another home does to the ledger that both use: it takes the period."""
    events: list[dict[str, Any]] = []
    cost, about = Budget(0.1, 1e-6), {"retraining": KEY}
    place.ledger.declare_block("tiny", "w1")
    place.ledger.reserve(run_id, "tiny", cost, events=events, about=about, blocks=("w1",))


def test_what_another_home_is_at_is_left_to_it(place: Place) -> None:
    before = (place.root / "params.yaml").read_text()

    def overtaken(stage: str, root: Path) -> None:
        if stage == "train":
            elsewhere(place)
        place.run_stage(stage, root)

    found = place.deliver(run_stage=overtaken)
    assert (found.kind, "charged already" in found.message) == ("refused", True)
    assert place.ledger.status("elsewhere") == "open"
    assert (place.root / "params.yaml").read_text() == before
    assert place.deliver().kind == "done"
    shutil.rmtree(Path(os.environ["EPSILONFLOW_HOME"]) / "retrainings")
    place.stages.clear()
    assert place.deliver().kind == "busy"
    place.ledger.settle("elsewhere", Budget(0.1, 1e-6), events=[])
    assert place.deliver().kind == "done"
    assert (place.stages, place.rows("reserve")) == ([], ["elsewhere"])


def test_a_ledger_that_is_away_for_a_moment_costs_no_run(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: Any, **__: Any) -> None:
        raise RefusedError("the ledger cannot be used.")

    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "settle", away)
        found = place.deliver()
    assert (found.kind, "goes on where it was at the next delivery" in found.message) == ("refused", True)
    assert place.deliver().kind == "promoted"
    assert place.rows("reserve") == place.rows("settle") != []


def test_what_a_checkout_that_is_gone_began_goes_on_in_another(
    place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with killed_in(train, "run_training"):
        place.deliver()
    old, new = place.root, tmp_path_factory.mktemp("clone") / "root"
    shutil.copytree(old, new)
    place.root = new
    monkeypatch.chdir(new)
    assert "finish it there" in place.deliver().message
    old.rename(old.with_name("moved"))
    assert place.deliver().kind == "promoted"
    assert place.rows("settle") == place.rows("reserve") != []
    assert (new / "models/visits/serving").is_symlink()


def test_the_last_retraining_is_the_last_that_began(place: Place) -> None:
    own = SETTINGS | {"delta": 1e-6}
    place.settings = Retraining.model_validate_json(json.dumps(own))
    assert place.deliver().kind == "promoted"
    place.arrive("w3")
    place.settings = Retraining.model_validate_json(
        json.dumps(own | {"every": "day"})
    )  # whose names sort before those of weeks
    assert place.deliver(1).kind == "promoted"
    assert "none of the blocks" in place.deliver(2).message
    assert len(place.rows("reserve")) == 2


@pytest.mark.parametrize(
    ("of", "name"), [(States, "write"), (delivery, "write_text"), (Registry, "add"), (Registry, "promote")]
)
def test_a_disk_that_is_full_between_the_stages_costs_a_sentence_and_no_run(
    place: Place, monkeypatch: pytest.MonkeyPatch, of: Any, name: str
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(of, name, full)
        found = place.deliver()
    assert (found.kind, found.message.startswith("the disk is full; make room")) == ("failed", True)
    assert place.deliver().kind == "promoted"
    assert len(place.rows("reserve")) == 1


def test_a_full_disk_leaves_params_as_they_were(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    before, write = (place.root / "params.yaml").read_text(), Path.write_text

    def cut_short(path: Path, text: str, **how: Any) -> int:
        if "params.yaml" not in path.name:
            return write(path, text, **how)
        write(path, "", **how)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", cut_short)
        place.deliver()
    assert (place.root / "params.yaml").read_text() == before

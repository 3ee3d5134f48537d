"""What goes wrong with a week's data, or is done in between, in the year of `tests.soak.faults`.

Each trouble is there for one delivery. Either it is refused or skipped in a sentence that says what to do, and nothing
is charged until it has ended; or the week is delivered, by its own recipe.
"""

import json
import multiprocessing
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ruamel.yaml import YAML

from algorithms.privacy.ledger import Ledger
from tasks.runs.dvc_stages import STAGES
from tests.soak import kills_check
from tests.soak.kills_place import CARD, PARAMS, POPULATION, Place
from tests.soak.one_process import enter, run_stage

ENDED = ("promoted", "kept")


@dataclass(frozen=True)
class Trouble:
    """Of a week.

    begin, end: make and mend it. kinds: how the delivery may end meanwhile; without a block that is late it may find
    others that are new. words: what it then says, in its log or its
    outcome. charges: how many runs beside the retraining's own are charged.
    """

    name: str
    begin: Callable[[Place, int], object]
    end: Callable[[Place, int], object]
    kinds: tuple[str, ...]
    words: str
    charges: int = 0

    def wrong(self, fresh: Sequence[kills_check.Row]) -> list[str]:
        """What is wrong with other runs than retrainings among the new rows, in sentences."""
        own = kills_check.charged_to_retrainings(fresh)
        reserved = [row["run_id"] for row in fresh if row["kind"] == "reserve" and row["run_id"] not in own]
        settled = [row["run_id"] for row in fresh if row["kind"] == "settle" and row["run_id"] not in own]
        is_right = len(reserved) == self.charges and reserved == settled
        return [] if is_right else [f"of other runs, {len(reserved)} are charged and {len(settled)} settled"]


def _file(place: Place, index: int) -> Path:
    return place.root / CARD["blocks"]["path"] / f"w{index:03}.csv"


def _newest(_place: Place, week: int) -> int:
    """The block that a week brings."""
    return week + 2


def _charged(place: Place, _week: int) -> int:
    """The newest block that was charged."""
    rows = kills_check.rows_of(place)
    return max(int(row["block"].removeprefix("w")) for row in rows if row["kind"] == "reserve")


def _take(index_of: Callable[[Place, int], int]) -> Callable[[Place, int], object]:
    """Takes a block away, which stays away while it is held back."""

    def begin(place: Place, week: int) -> None:
        index = index_of(place, week)
        place.held_back.add(index)
        _file(place, index).unlink()

    return begin


def _arrive(place: Place, week: int) -> None:
    place.held_back.clear()
    place.arrive(week)


def _repeat(place: Place, week: int) -> None:
    shutil.copyfile(_file(place, _charged(place, week)), _file(place, _newest(place, week)))


def _deliver_right(place: Place, week: int) -> None:
    _file(place, _newest(place, week)).unlink()
    place.arrive(week)


def _correct(place: Place, week: int) -> None:
    with _file(place, _charged(place, week)).open("a") as file:
        file.write("33,44,no\n")


def _restore(place: Place, week: int) -> None:
    path = _file(place, _charged(place, week))
    path.write_text(path.read_text().removesuffix("33,44,no\n"))


def _overrule(place: Place, week: int) -> None:
    Ledger.open(place.url).overrule(POPULATION, f"w{_charged(place, week):03}", by="the owner")


def _choose_other_settings(place: Place, week: int) -> None:
    """As a run of somebody else leaves params.yaml, of another recipe and another data set."""
    algorithm = PARAMS["algorithm"] | {"steps": 2 + week, "update": {"learning_rate": 0.001}}
    yaml = YAML(typ="safe", pure=True)
    yaml.dump(CARD | {"name": "others", "population": "others"}, place.root / "data/cards/others.yaml")
    yaml.dump(
        PARAMS | {"algorithm": algorithm, "data": {"dataset": "others"}, "model": {"name": "softmax"}},
        place.root / "params.yaml",
    )


def _run_once(place: Place, week: int) -> None:
    """A run on the newest block by hand, with a recipe of its own, which stays in params.yaml and is charged."""
    algorithm = PARAMS["algorithm"] | {"steps": 10 + week, "update": {"learning_rate": 0.001}}
    data = {"dataset": POPULATION, "blocks": [f"w{_newest(place, week):03}"]}
    params = PARAMS | {"algorithm": algorithm, "data": data, "privacy": PARAMS["privacy"] | {"epsilon": 0.2}}
    YAML(typ="safe", pure=True).dump(params, place.root / "params.yaml")

    def run() -> None:
        enter(place)
        for stage in STAGES:
            run_stage(stage, place.root)

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join()
    assert process.exitcode == 0


def _nothing(_place: Place, _week: int) -> None:
    return None


TROUBLES = (
    Trouble("none", _nothing, _nothing, ENDED, ""),
    Trouble("another run in between", _choose_other_settings, _nothing, ENDED, ""),
    Trouble("a run by hand in between", _run_once, _nothing, ENDED, "", charges=1),
    Trouble("a charged block is gone", _take(_charged), _arrive, ("skipped", *ENDED), "are not there"),
    Trouble("the block is late", _take(_newest), _arrive, ("skipped", *ENDED), ""),
    Trouble(
        "the block is one of before", _repeat, _deliver_right, ("refused",), "epsilonflow ledger overrule"
    ),
    Trouble("a charged block is changed", _correct, _restore, ("refused",), "does not hold the records"),
    Trouble("a charged block is corrected", _correct, _overrule, ("refused",), "epsilonflow ledger overrule"),
)


def in_turn(draw: random.Random) -> Callable[[], Trouble]:
    """Troubles in an order of chance, each as often as the others."""
    waiting: list[Trouble] = []

    def following() -> Trouble:
        if not waiting:
            waiting.extend(draw.sample(TROUBLES, len(TROUBLES)))
        return waiting.pop()

    return following


def other_recipe(place: Place, run_id: str) -> list[str]:
    """What is wrong with the recipe of a model, in sentences."""
    path = place.registry / run_id / "plan.json"
    if not path.is_file():
        return []
    plan = json.loads(path.read_text())
    planned = (plan["dataset"], plan["model"]["name"], plan["steps"])
    own = (POPULATION, PARAMS["model"]["name"], PARAMS["algorithm"]["steps"])
    return [] if planned == own else [f"a model by another recipe: {planned}"]

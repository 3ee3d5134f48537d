"""python -m tests.soak.year: a year of weekly retrainings on Adult, each a real one, and the caps checked afterwards.

The 32,561 training records come in 52 blocks, one a week, in the order of the file, and are treated as private. Every
week the scheduled retraining runs in this process, as its flow would run it: blocks and epsilon from the ledger, the
five stages, the comparison on the 16,281 test records, promotion. Written are a row a week, a row a block, and a chart.

With --private a quarter of each week's people is held out in private instead, and --weeks ends the year early.
"""

import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer
from ruamel.yaml import YAML

from algorithms.privacy.ledger import Ledger
from data.card import CARDS
from tasks import prepare
from tasks.config import data_mirror, home
from tasks.config.params import load
from tasks.evaluate import metrics_of
from tasks.reporting.figures import LIGHT, png
from tasks.retraining import Retraining
from tasks.retraining.delivery import DeliveryWork, Outcome, retrain
from tasks.runs.dvc_stages import StageRefusedError
from tasks.runs.metrics import headline_metric
from tasks.runs.stage_main import refusals
from tests.soak.year_check import recomputed
from tests.soak.year_figure import figure

WEEKS = 52
POPULATION = "adult-weeks"
CAP = {"epsilon": 3.0, "delta": 1e-5}
ORDER = 8.0
RETRAINING: dict[str, Any] = {
    "name": POPULATION,
    "dataset": POPULATION,
    "every": "week",
    "blocks": {"policy": "last", "window": 8, "at_least": 4},
    "spread": {"policy": "equal", "planned": 8},
    "minimal_gain": 0.0,
}
_FIRST = datetime(2026, 1, 5, tzinfo=UTC)


def checkout(root: Path, source: Path, *, private: bool = False) -> list[list[str]]:
    """Makes a checkout for the year in `root`; returns the lines of each week's file.

    private: whether a part of each week's people is held out in private, rather than the test file, which is public.
    """
    card = YAML(typ="safe", pure=True).load(CARDS / "adult.yaml")
    lines = [line for line in source.read_text().splitlines() if line.strip()]
    card |= {"name": POPULATION, "population": POPULATION, "public": False, "cap": CAP, "folder": "adult"}
    card |= {"composition": {"kind": "renyi", "order": ORDER}, "records": {"at_most": 60_000}}
    card |= {
        "files": {"test": card["files"]["test"]},
        "blocks": {"kind": "folder", "path": "datasets/raw/weeks"},
    }
    if private:
        del card["files"], card["reader"]["skip_lines"]
        card |= {"holdout": "private", "split": {"salt": "year", "test_fraction": 0.25}}
    (root / "datasets/raw/weeks").mkdir(parents=True)
    (root / "data/cards").mkdir(parents=True)
    (root / ".dvc/tmp").mkdir(parents=True)
    (root / "dvc.yaml").write_text("stages: {}\n")
    yaml = YAML(typ="safe", pure=True)
    yaml.dump(card, root / "data/cards" / f"{POPULATION}.yaml")
    yaml.dump(params(), root / "params.yaml")
    bounds = [round(week * len(lines) / WEEKS) for week in range(WEEKS + 1)]
    return [lines[start:stop] for start, stop in pairwise(bounds)]


def params() -> dict[str, Any]:
    """What a run is, but for its blocks and its epsilon."""
    update = {"learning_rate": 2.0, "momentum": 0.9, "schedule": "linear"}
    algorithm = {"name": "dp_sgd", "sampling_rate": 0.2, "steps": 60, "clip_norm": 1.0, "update": update}
    return {
        "data": {"dataset": POPULATION},
        "privacy": {"epsilon": 1.0, "delta": 1e-5, "accountant": "rdp", "count_noise": 100.0},
        "algorithm": algorithm,
        "model": {"name": "logistic"},
        "tracking": {"mode": "disabled"},
        "performance": {"threads": 1},
    }


def run_here(stage: str, root: Path) -> None:
    """Runs a stage in this process."""
    with _inside(root):
        try:
            _prepare(root) if stage == "prepare" else import_module(f"tasks.{stage}").main()
        except refusals() as refusal:
            raise StageRefusedError(str(refusal)) from None


def _prepare(root: Path) -> None:
    """The stage itself reads the cards that lie beside its code, not those of another checkout."""
    settings, destination = load(root / "params.yaml", reads=prepare.READS), root / prepare.PREPARED
    prepare.prepare(
        settings,
        mirror=data_mirror(),
        home=home(),
        destination=destination,
        root=root,
        cards=root / "data/cards",
    )


@contextmanager
def _inside(root: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(root)
    try:
        yield
    finally:
        os.chdir(before)


def play(root: Path, weeks: list[list[str]], ledger: Ledger) -> Iterator[dict[str, Any]]:
    """A row for each week, as it ends."""
    work = DeliveryWork(
        Retraining.model_validate_json(json.dumps(RETRAINING)), root, run_here, lambda _: None
    )
    for number, lines in enumerate(weeks, start=1):
        began = time.monotonic()
        (root / f"datasets/raw/weeks/w{number:02}.csv").write_text("\n".join(lines) + "\n")
        outcome = retrain(work, now=_FIRST + timedelta(weeks=number - 1, hours=3))
        yield _row(work, ledger, number, outcome) | {"seconds": round(time.monotonic() - began, 2)}


def _row(work: DeliveryWork, ledger: Ledger, number: int, outcome: Outcome) -> dict[str, Any]:
    row: dict[str, Any] = {"week": number, "outcome": outcome.kind}
    if outcome.kind in ("refused", "failed"):
        raise RuntimeError(outcome.message)
    if outcome.kind in ("promoted", "kept"):
        state = work.states.all()[-1]
        serving = work.registry.serving
        metrics = json.loads((work.root / "artifacts/metrics.json").read_text())
        row |= {"blocks": len(state.blocks), "first_block": state.blocks[0], "epsilon": metrics["epsilon"]}
        row |= {"accuracy": metrics["test_accuracy"]}
        if metrics.get("held_out") == "private":  # of the model in use there is the difference alone
            gain = metrics.get("test_difference")
            row |= {"accuracy": metrics["test_accuracy"]["value"], "gain": gain and gain["value"]}
            return row | _spent(ledger)
        prepared = work.root / "datasets/prepared"
        serves = (
            None if serving is None else headline_metric(metrics_of(serving / "model.safetensors", prepared))
        )
        row |= {"serving_accuracy": serves}
    return row | _spent(ledger)


def _spent(ledger: Ledger) -> dict[str, Any]:
    blocks = ledger.blocks(POPULATION)
    most = ledger.balance(POPULATION).spent.epsilon
    return {"retired": sum(block.retired for block in blocks), "most_spent": most}


def main(
    folder: Annotated[Path, typer.Option(help="Where the tables go.")] = Path("comparisons/results"),
    chart: Annotated[Path, typer.Option(help="The chart to draw.")] = Path("docs/results/retraining.png"),
    weeks: Annotated[int, typer.Option(help="How many weeks are played.")] = WEEKS,
    private: Annotated[bool, typer.Option(help="Hold people of each week out in private.")] = False,
) -> None:
    """Play the year; EPSILONFLOW_DATA_MIRROR names the folder with adult/adult.data."""
    mirror = data_mirror()
    if mirror is None:
        raise typer.BadParameter("set EPSILONFLOW_DATA_MIRROR to a folder that holds adult/adult.data")
    with tempfile.TemporaryDirectory() as place:
        root, own_home = Path(place, "checkout"), Path(place, "home")
        os.environ |= {"EPSILONFLOW_HOME": str(own_home)}
        own_home.mkdir()
        files = checkout(root, mirror / "adult" / "adult.data", private=private)[:weeks]
        ledger = Ledger.open(f"sqlite:///{own_home}/ledger.sqlite")
        rows = []
        for row in play(root, files, ledger):
            rows.append(row)
            typer.echo(" ".join(f"{name}={value}" for name, value in row.items()))
        by_block = recomputed(ledger, POPULATION, order=ORDER, delta=CAP["delta"])
    by_week, blocks = pd.DataFrame(rows), pd.DataFrame(by_block)
    by_week.to_csv(folder / "retraining-weeks.csv", index=False)
    blocks.to_csv(folder / "retraining-blocks.csv", index=False)
    if not private:  # which has no accuracy of the model in use to draw
        chart.write_bytes(png(figure(by_week, blocks, cap=CAP["epsilon"], theme=LIGHT)))
    typer.echo(f"largest epsilon of a block, recomputed: {blocks['at_order'].max():.6f} of {CAP['epsilon']}")


if __name__ == "__main__":
    typer.run(main)

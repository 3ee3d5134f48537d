"""One cell of a comparison: plan, reserve, train, evaluate, settle, and its result as one JSON file.

The noise is seeded by the cell, so the result can be had again, and is not private. A process killed on the way
leaves no result: the cell runs again from its start, under the reservation that it made.
"""

import json
import math
import os
import time
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from algorithms.models import Model
from algorithms.privacy.barrier import Performance
from algorithms.privacy.budget import Budget
from algorithms.privacy.diagnostics import Diagnostics
from algorithms.privacy.events import run_lengths, schedule_to_json
from algorithms.privacy.ledger import Ledger
from algorithms.privacy.noise import seeded_generator
from algorithms.privacy.trace import Trace
from algorithms.receipt import reserved_events
from algorithms.training import train
from data import PublicDescription
from data.prepared import HeldOut
from tasks import params
from tasks.calibrate import model_for
from tasks.comparing.cell_card import card_of
from tasks.comparing.cell_curve import Curve, mean_losses
from tasks.comparing.cells import FILE_FORMAT, Cell
from tasks.comparing.data import Sides, public_of, sides
from tasks.comparing.files import Place, write_json, write_parquet
from tasks.comparing.plans import Planned, planned
from tasks.evaluate import evaluate

_CAP = Budget(1e9, 1.0)
"""Of a comparison's own ledger: its runs are recorded there, and none is refused."""


@dataclass(frozen=True)
class Context:
    """What cells share. code: a digest of the algorithms' source. runs: how many the whole comparison has.

    performance: what a cell may take, which does not decide its result.
    """

    place: Place
    code: str
    runs: int
    performance: Performance = field(default_factory=Performance)


def open_ledger(place: Place, cell: Cell) -> Ledger:
    """The ledger that a cell is recorded in."""
    return Ledger.open(place.ledger_url(dataset=cell.dataset, model=cell.model, method=cell.method))


def plan_cell(context: Context, cell: Cell) -> Planned:
    """The plan of a cell; raises a refusal where it cannot run, a fold of one class included."""
    return planned(context.place, cell, public_of(context.place.store, cell), code=context.code)


def run_cell(context: Context, cell: Cell, ledger: Ledger) -> None:
    """Runs a cell and writes its result; threads of torch: 1. Raises what planning and training raise."""
    torch.set_num_threads(1)
    place, data = context.place, sides(context.place.store, cell)
    prepared = plan_cell(context, cell)
    _reserve(ledger, cell, prepared, data)
    trained = _trained(cell, prepared, data, context.performance)
    events = schedule_to_json(run_lengths(trained.trace.events()))
    ledger.settle(cell.digest, prepared.plan.cost, events=events)
    results = _results(cell, prepared, trained, data)
    if trained.curve is not None:
        frame = trained.curve.frame(trained.model, trained.trace, data, regularisation=_regularisation(cell))
        write_parquet(place.cells / f"{cell.digest}.curve.parquet", frame)
    if cell.is_first:
        rows = pd.DataFrame([asdict(row) for row in trained.trace.rows])
        write_parquet(place.cells / f"{cell.digest}.trace.parquet", rows)
    if trained.diagnostics is not None:
        write_parquet(place.cells / f"{cell.digest}.diagnostics.parquet", trained.diagnostics.frame())
    write_json(
        place.cells / f"{cell.digest}.json",
        {
            "format": FILE_FORMAT,
            "digest": cell.digest,
            "cell": asdict(cell),
            "code": context.code,
            "results": results,
            "releases": _releases(trained.trace),
            "card": card_of(
                cell, prepared.plan, data.public, trained.model, name=place.name, runs=context.runs
            ),
        },
    )


def build_models(context: Context, cells: Iterable[Cell]) -> None:
    """Draws the starts of all models; a start is drawn from torch's one generator, so not while cells run."""
    for cell in cells:
        public = public_of(context.place.store, cell)
        _model(_groups(cell), public)


def _own_model(cell: Cell, public: PublicDescription) -> Model:
    """A model of the cell's own: a module is changed while it computes, so threads must not share one."""
    return deepcopy(_model(_groups(cell), public))


def _groups(cell: Cell) -> str:
    """The groups of params.yaml that a model follows from, as JSON."""
    return json.dumps({"model": cell.model_group, "features": cell.features})


@cache
def _model(groups: str, public: PublicDescription) -> Model:
    return model_for(params.parse(json.loads(groups), reads=("model", "features")), public)


@dataclass(frozen=True)
class _Trained:
    model: Model
    parameters: torch.Tensor
    trace: Trace
    curve: Curve | None
    diagnostics: Diagnostics | None
    seconds: float
    steps: int


def _reserve(ledger: Ledger, cell: Cell, prepared: Planned, data: Sides) -> None:
    """Reserves the plan's cost; not for a run that settled and was killed before its result was written."""
    population, plan = data.public.population, prepared.plan
    ledger.declare(population, _CAP, public=True)
    if ledger.status(cell.digest) != "settled":
        about = {"algorithm": cell.settings["name"], "dataset": cell.dataset, "what": "a run of a comparison"}
        ledger.reserve(cell.digest, population, plan.cost, events=reserved_events(plan), about=about)


def _trained(cell: Cell, prepared: Planned, data: Sides, performance: Performance) -> _Trained:
    """Trains from the start, with no checkpoint: a cell is short, and one that was cut off runs again."""
    model = _own_model(cell, data.public)
    algorithm, plan = prepared.settings.algorithm, prepared.plan
    start = algorithm.init(model.initial_parameters(), plan)
    curve = Curve(algorithm.released, plan.steps, start=start) if cell.record["curves"] else None
    diagnostics, taken = Diagnostics() if cell.is_diagnosed else None, 0

    def tell(step: int, _epsilon: float, _noise_std: float) -> None:
        nonlocal taken
        taken = step

    began = time.perf_counter()
    state, trace, model = train(
        algorithm,
        plan,
        model,
        open_records=lambda: data.train,
        generator=seeded_generator(cell.noise_seed),
        run_id=cell.digest,
        folder=Path(os.devnull),
        performance=performance,
        checkpoint_seconds=math.inf,
        tell=tell,
        observe=curve.observe if curve else None,
        features=prepared.settings.features,
        diagnostics=diagnostics,
    )
    seconds = time.perf_counter() - began - (curve.seconds if curve else 0.0)
    return _Trained(model, algorithm.released(state), trace, curve, diagnostics, seconds, taken)


def _results(cell: Cell, prepared: Planned, trained: _Trained, data: Sides) -> dict[str, Any]:
    plan, trace = prepared.plan, trained.trace
    records = HeldOut(data.public, data.test.features, data.test.labels)
    evaluation = evaluate(trained.model, trained.model.published(trained.parameters), records)
    objective = None
    if cell.record["objective"] is not None:
        (loss,) = mean_losses(trained.model, trained.parameters[None], data.train)
        norm = float(trained.parameters.double().square().sum())
        objective = loss + _regularisation(cell) * norm
    return {
        "accuracy": float((evaluation.predicted == data.test.labels).mean()),
        "test_loss": _finite(evaluation.loss),
        "objective": _finite(objective),
        "seconds": trained.seconds,
        "steps": trained.steps,
        "planned_steps": plan.steps,
        "epsilon_spent": _finite(trace.rows[-1].epsilon) if trace.rows else 0.0,
        "epsilon_planned": _finite(plan.cost.epsilon),
        "noise_multiplier": plan.fixed_noise,
        "sampling_rate": plan.sampling_rate,
        "records": data.public.records,
    }


def _regularisation(cell: Cell) -> float:
    objective = cell.record["objective"]
    return objective["regularisation"] if objective else 0.0


def _releases(trace: Trace) -> list[dict[str, Any]]:
    """What was asked of the records, a row a kind of release."""
    if not trace.rows:
        return []
    rows = pd.DataFrame([asdict(row) for row in trace.rows])
    summary = []
    for (kind, noise, sampling), of_kind in rows.groupby(["kind", "noise", "sampling"]):
        spread = {
            f"{end}_{name}": _finite(getattr(of_kind[name], function)())
            for name in ("noise_multiplier", "noise_std")
            for end, function in (("least", "min"), ("most", "max"))
        }
        summary.append({"kind": kind, "noise": noise, "sampling": sampling, "count": len(of_kind)} | spread)
    return summary


def _finite(number: float | None) -> float | None:
    return float(number) if number is not None and math.isfinite(number) else None

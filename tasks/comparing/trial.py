"""One cell of a comparison: plan, reserve, train, evaluate, settle, and write the result as one JSON file.

Plans are made before the first cell trains and are kept on disk; cells with equal inputs share one. The noise is seeded
by the cell, so the result is reproducible and not private. A killed process leaves no result: the cell runs again from
its start, under the same reservation. The card of a cell promises nothing; like the card of any run it holds facts and
is signed with the owner's key. For the curve of the objective, released parameters are kept during training, and their
losses are computed afterwards.
"""

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from algorithms.core.method import Plan
from algorithms.core.receipt import reserved_events
from algorithms.core.training import train
from algorithms.errors import RefusedError
from algorithms.models import Model
from algorithms.privacy.accounting import Budget
from algorithms.privacy.accounting.events import run_lengths, schedule_to_json
from algorithms.privacy.accounting.filters import holding_to_json
from algorithms.privacy.barrier.barrier import Performance
from algorithms.privacy.barrier.trace import Diagnostics, Trace
from algorithms.privacy.card import Signed, features_of, guarantee, model_of, schema
from algorithms.privacy.card.build import composition_of
from algorithms.privacy.ledger import Ledger
from algorithms.privacy.mechanisms.noise import seeded_generator
from data import PublicDescription
from data.files import read_json
from data.prepared import HeldOut
from data.readers.records import Records
from tasks.calibrate import READS, model_files, model_for, plan_for
from tasks.comparing.data import Sides, public_of, sides
from tasks.comparing.files import Place, write_json, write_parquet
from tasks.comparing.trials import Trial, digest_of
from tasks.config import params
from tasks.config.environment import home
from tasks.config.params import Params
from tasks.evaluate import MOST_OUTPUTS, evaluate, measured
from tasks.runs.quality import measures
from tasks.runs.signing import signing_key

_WITHOUT_NOISE = {"epsilon": 1.0, "delta": 1e-9, "accountant": "pld"}
"""A placeholder target for methods without noise; nothing depends on it."""
_POINTS = 200
_BATCH, _AT_ONCE = 4096, 32
_CAP = Budget(1e9, 1.0)
"""The cap in a comparison's own ledger, which records runs and refuses none."""


@dataclass(frozen=True)
class Planned:
    """A cell's plan and the parameters from which it was made."""

    plan: Plan
    settings: Params


@dataclass(frozen=True)
class Context:
    """What all cells share.

    code: a digest of the algorithms' source. runs: the number of runs of the whole comparison. performance: the
    resources that a cell may use, which do not change its result.
    """

    place: Place
    code: str
    runs: int
    performance: Performance = field(default_factory=Performance)


def plan_cell(context: Context, cell: Trial) -> Planned:
    """Plan a cell, or read the plan from disk if there is one with equal inputs.

    Raises RefusedError, ParamsRefusedError, ModelRefusedError or DataRefusedError if the cell cannot run, for example
    because a fold has a single class.
    """
    settings, public = _params(cell), public_of(context.place.store, cell)
    inputs = [cell.settings, cell.model, cell.accountant, cell.epsilon, cell.delta]
    inputs += [extra for extra in (cell.model_settings, cell.features) if extra]
    name = digest_of([*inputs, json.loads(public.to_json()), context.code])
    path = context.place.plans / f"{name}.json"
    if path.exists():
        return Planned(Plan.from_json(read_json(path)), settings)
    plan = plan_for(settings, public)
    _check_is_as_declared(cell, plan)
    write_json(path, plan.to_json())
    return Planned(plan, settings)


def _params(cell: Trial) -> Params:
    target = {"epsilon": cell.epsilon, "delta": cell.delta, "accountant": cell.accountant}
    document = {
        "privacy": (_WITHOUT_NOISE if cell.epsilon is None else target) | {"noise": "seeded"},
        "features": cell.features,
        "algorithm": cell.settings,
        "model": cell.model_group,
    }
    return params.parse(document, reads=READS, name=f"methods.{cell.method}")


def _check_is_as_declared(cell: Trial, plan: Plan) -> None:
    is_private = math.isfinite(plan.cost.epsilon)
    if is_private and cell.epsilon is None:
        raise RefusedError(f"methods.{cell.method} adds noise, but says private: false; leave that out.")
    if not is_private and cell.epsilon is not None:
        raise RefusedError(f"methods.{cell.method} adds no noise; say private: false, and it runs once.")


class CellCard(Signed):
    """What a run of a comparison promises, and what it does not.

    cost: what its events would cost with secret noise. comparison, runs: the name of the comparison and its number of
    runs, which as a whole are charged to nobody.
    """

    guarantee: Literal["seeded", "none"]
    cost: schema.Amount
    adjacency: schema.Adjacency
    accountant: schema.Accountant
    composition: schema.Composition
    settings_from_records: bool
    diagnostics: bool
    transform: Literal["none", "scattering", "encoder"]
    encoder: schema.Encoder | None
    features: schema.Features
    model: schema.Model
    unit: schema.Name
    dataset: schema.Name
    population: schema.Name
    source: schema.Name
    licence: schema.Name
    comparison: schema.Name
    runs: schema.Count


def card_of(
    cell: Trial, plan: Plan, public: PublicDescription, model: Mapping[str, Any], *, name: str, runs: int
) -> dict[str, Any]:
    """The signed card. model: as in a plan's document. name, runs: name and number of runs of the comparison."""
    epsilon = plan.cost.epsilon if math.isfinite(plan.cost.epsilon) else None
    document = {
        "schema_version": schema.SCHEMA_VERSION,
        "signature": None,
        "guarantee": guarantee(cost=epsilon, private_noise=False, is_covered=False),
        "cost": {"epsilon": epsilon, "delta": plan.cost.delta},
        "adjacency": plan.adjacency,
        "accountant": plan.accountant,
        "composition": composition_of({"filter": holding_to_json(plan.filter)}),
        "settings_from_records": plan.not_private is not None,
        "diagnostics": cell.is_diagnosed,
        "transform": public.transform,
        "encoder": None if public.encoder is None else asdict(public.encoder),
        "features": features_of(cell.features or {"name": "none"}),
        "model": model_of(model),
        "unit": public.unit,
        "dataset": public.dataset,
        "population": public.population,
        "source": public.source,
        "licence": public.licence,
        "comparison": name,
        "runs": runs,
    }
    return _signed(document)


def counted(card: Mapping[str, Any], runs: int) -> dict[str, Any]:
    """The card with another number of runs, signed again."""
    return _signed({**card, "runs": runs, "signature": None})


def _signed(document: Mapping[str, Any]) -> dict[str, Any]:
    return CellCard.model_validate_json(json.dumps(document)).signed(signing_key(home())).to_json()


class Curve:
    """Keeps the released parameters after selected steps: after each of up to 200 steps, otherwise after about 200.

    start: the algorithm's state before the first step.
    """

    def __init__(self, released: Callable[[Any], Tensor], steps: int, *, start: Any) -> None:
        self._released = released
        self._wanted = points(steps)
        self._last: tuple[int, Any] | None = None
        self._kept: list[tuple[int, Tensor]] = []
        self._keep(0, start)
        self.seconds = 0.0

    def on_state(self, step: int, state: Any) -> None:
        """Called after each step."""
        began = time.perf_counter()
        self._last = (step, state)
        if step in self._wanted:
            self._keep(step, state)
        self.seconds += time.perf_counter() - began

    def frame(self, model: Model, trace: Trace, data: Sides, *, regularisation: float) -> pd.DataFrame:
        """A table: step, objective, and epsilon spent by then, an upper bound. model: the trained model."""
        if self._last and self._last[0] != self._kept[-1][0]:
            self._keep(*self._last)  # a run that ended before its last planned step
        parameters = torch.stack([kept for _, kept in self._kept])
        losses = mean_losses(model, parameters, data.train)
        norms = parameters.double().square().sum(dim=1).numpy()
        steps = [step for step, _ in self._kept]
        spent = np.array([0.0, *(row.epsilon for row in trace.rows)])
        done = np.searchsorted([row.step for row in trace.rows], steps, side="left")
        return pd.DataFrame(
            {"step": steps, "objective": losses + regularisation * norms, "epsilon": spent[done]}
        )

    def _keep(self, step: int, state: Any) -> None:
        self._kept.append((step, self._released(state).detach().clone().cpu()))


def points(steps: int) -> set[int]:
    """The steps that a curve keeps: all of up to 200, otherwise about 200 that are denser at the start."""
    if steps <= _POINTS:
        return set(range(1, steps + 1))
    dense = np.geomspace(1, steps, _POINTS // 2).round().astype(int)
    even = np.linspace(1, steps, _POINTS // 2).round().astype(int)
    return {*dense.tolist(), *even.tolist()}


def mean_losses(model: Model, parameters: Tensor, part: Records) -> NDArray[np.float64]:
    """The mean loss over the records at each of several parameters, shape [k, d] -> [k]."""

    def total(point: Tensor, inputs: Tensor, labels: Tensor) -> Tensor:
        return model.losses(model.outputs(model.named(point), inputs), labels).double().sum()

    totals = torch.zeros(len(parameters), dtype=torch.float64)
    with torch.no_grad():
        one = torch.from_numpy(np.array(part.features[:1]))
        outputs = model.outputs(model.named(parameters[0]), one).numel() * min(_AT_ONCE, len(parameters))
        size = max(1, min(_BATCH, MOST_OUTPUTS // outputs))
        for start in range(0, len(part.labels), size):
            inputs = torch.from_numpy(np.array(part.features[start : start + size]))
            labels = torch.from_numpy(np.array(part.labels[start : start + size]))
            for first in range(0, len(parameters), _AT_ONCE):
                some = parameters[first : first + _AT_ONCE]
                totals[first : first + _AT_ONCE] += torch.func.vmap(total, in_dims=(0, None, None))(
                    some, inputs, labels
                )
    result: NDArray[np.float64] = totals.numpy() / len(part.labels)
    return result


def open_ledger(place: Place, cell: Trial) -> Ledger:
    """Open the ledger in which a cell is recorded."""
    return Ledger.open(place.ledger_url(dataset=cell.dataset, model=cell.model, method=cell.method))


def run_cell(context: Context, cell: Trial, ledger: Ledger) -> None:
    """Run a cell with one thread of torch and write its result. Raises what planning and training raise."""
    torch.set_num_threads(1)
    place, data = context.place, sides(context.place.store, cell)
    prepared = plan_cell(context, cell)
    _reserve(ledger, cell, prepared, data)
    trained = _trained(cell, prepared, data, context.performance)
    events = schedule_to_json(run_lengths(trained.trace.events()))
    ledger.settle(cell.digest, prepared.plan.cost, events=events)
    results = _results(cell, prepared, trained, data)
    model = prepared.settings.model
    described = model.model_dump() | {
        "files": model_files(model),
        "parameters": prepared.plan.public.parameters,
    }
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
            "digest": cell.digest,
            "cell": asdict(cell),
            "code": context.code,
            "results": results,
            "card": card_of(cell, prepared.plan, data.public, described, name=place.name, runs=context.runs),
        },
    )


def build_models(context: Context, cells: Iterable[Trial]) -> None:
    """Initialise all models before cells run, since initialisation uses torch's global generator."""
    for cell in cells:
        _model(cell, public_of(context.place.store, cell))


def _model(cell: Trial, public: PublicDescription) -> Model:
    """The model of a cell, which is not changed: a cell trains a copy, since threads must not share a module."""
    return _built(json.dumps({"model": cell.model_group, "features": cell.features}), public)


@cache
def _built(groups: str, public: PublicDescription) -> Model:
    """Build the model that these groups of params.yaml describe, given as JSON."""
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


def _reserve(ledger: Ledger, cell: Trial, prepared: Planned, data: Sides) -> None:
    """Reserve the plan's cost, unless the run is settled already and was killed before its result was written."""
    population, plan = data.public.population, prepared.plan
    ledger.declare(population, _CAP, public=True)
    if ledger.status(cell.digest) != "settled":
        about = {"algorithm": cell.settings["name"], "dataset": cell.dataset, "what": "a run of a comparison"}
        ledger.reserve(cell.digest, population, plan.cost, events=reserved_events(plan), about=about)


def _trained(cell: Trial, prepared: Planned, data: Sides, performance: Performance) -> _Trained:
    """Train from the start and without checkpoints: cells are short, and an interrupted one runs again."""
    model = deepcopy(_model(cell, data.public))
    algorithm, plan = prepared.settings.algorithm, prepared.plan
    start = algorithm.init(model.initial_parameters(), plan)
    curve = Curve(algorithm.released, plan.steps, start=start) if cell.record["curves"] else None
    diagnostics, taken = Diagnostics() if cell.is_diagnosed else None, 0

    def on_step(step: int, _epsilon: float, _noise_std: float) -> None:
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
        on_step=on_step,
        on_state=curve.on_state if curve else None,
        features=prepared.settings.features,
        diagnostics=diagnostics,
    )
    seconds = time.perf_counter() - began - (curve.seconds if curve else 0.0)
    return _Trained(model, algorithm.released(state), trace, curve, diagnostics, seconds, taken)


def _results(cell: Trial, prepared: Planned, trained: _Trained, data: Sides) -> dict[str, Any]:
    plan, trace = prepared.plan, trained.trace
    records, known = HeldOut(data.public, data.test.features, data.test.labels), data.public.known
    evaluation = evaluate(trained.model, trained.model.published(trained.parameters), records)
    found = measured(known, evaluation, data.test.labels)
    objective = None
    if cell.record["objective"] is not None:
        (loss,) = mean_losses(trained.model, trained.parameters[None], data.train)
        norm = float(trained.parameters.double().square().sum())
        objective = loss + _regularisation(cell) * norm
    return {
        **{name: _finite(value) for name, value in measures(found).items()},
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


def _regularisation(cell: Trial) -> float:
    objective = cell.record["objective"]
    return objective["regularisation"] if objective else 0.0


def _finite(number: float | None) -> float | None:
    return float(number) if number is not None and math.isfinite(number) else None

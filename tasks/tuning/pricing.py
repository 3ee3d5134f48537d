"""What a search may try (tune.yaml), and the largest epsilon of a trial with which the whole fits."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import numpy as np
import torch
from pydantic import Field, JsonValue, ValidationError, model_validator
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from algorithms.core.method import by_accountants
from algorithms.errors import RefusedError
from algorithms.gradients import L2
from algorithms.models import Model
from algorithms.privacy.accounting.epsilon import Accountant, adjacency_named
from algorithms.privacy.accounting.events import Schedule, schedule_from_json
from algorithms.privacy.accounting.selection import Trials, after_shared, all_shown
from algorithms.privacy.barrier.statistics import Statistic, shape_of
from algorithms.privacy.mechanisms.mechanisms import Gaussian
from algorithms.privacy.mechanisms.release import total_release
from data import PublicDescription
from data.readers.records import Records
from tasks.calibrate import calibrate, model_for
from tasks.config import params
from tasks.config.params import Group, ParamsRefusedError
from tasks.evaluate import record_scores

READS = ("data", *("privacy", "features", "algorithm", "model", "performance", "tracking", "ledger"))
_LARGEST_SPACE, _TRIES, _NEAR = 512, 16, 0.98


class Range(Group):
    """Numbers from low to high, both included, as so many points apart equally or by equal factors."""

    low: float
    high: float
    points: int = Field(ge=2, le=64)
    scale: Literal["linear", "log"] = "log"

    @model_validator(mode="after")
    def _is_a_range(self) -> "Range":
        if not self.low < self.high or (self.scale == "log" and self.low <= 0):
            raise ValueError("a range needs low < high, and low above 0 on a log scale")
        return self

    def values(self) -> list[float]:
        """The points, rounded to six digits."""
        between = np.geomspace if self.scale == "log" else np.linspace
        return [float(f"{value:.6g}") for value in between(self.low, self.high, self.points)]


class Draw(Group):
    """How the number of trials is drawn. mean: of it. shape: of the truncated negative binomial; 1 is geometric."""

    distribution: Literal["negative_binomial", "poisson"] = "negative_binomial"
    mean: float = Field(default=8.0, ge=1, le=1e4)
    shape: float = Field(default=1.0, ge=0, le=100)

    def trials(self) -> Trials:
        """As the accounting has it."""
        return Trials(self.mean, math.inf if self.distribution == "poisson" else self.shape)


class Objective(Group):
    """What is maximised: accuracy, or what else models for the target are compared by, on records that the card
    declares public, or a noised sum of `record_scores`, which of classes are the right answers.

    on: "private" takes a share of the records to train on, each by a coin of its own, and adds up what is said of them
    with noise of this multiplier; that is charged with the trial.
    """

    on: Literal["public", "private"] = "public"
    share: float = Field(default=0.1, gt=0, lt=1)
    noise_multiplier: float = Field(default=20.0, gt=0)


class Tuning(Group):
    """tune.yaml; all else about a trial is in params.yaml.

    space: values by dotted key of params.yaml, as lists or ranges. epsilon, delta: of the whole search; delta as in
    params.yaml where it is left out. show_all: shows all trials, each settings once, and pays for all; "cheaper" takes
    it where it leaves a trial more epsilon.
    """

    space: dict[str, list[JsonValue] | Range] = Field(min_length=1)
    epsilon: float = Field(gt=0)
    delta: Annotated[float, Field(gt=0, lt=1)] | None = None
    trials: Draw = Field(default_factory=Draw)
    objective: Objective = Field(default_factory=Objective)
    show_all: bool | Literal["cheaper"] = False


EXAMPLE = "{space: {algorithm.clip_norm: [0.3, 1.0]}, epsilon: 3.0}"


def load(path: Path) -> Tuning:
    """The settings in a file; raises ParamsRefusedError for what they cannot be."""
    if not path.exists():
        raise ParamsRefusedError(f"there is no file {path}; write one, such as {EXAMPLE}.")
    try:
        document = YAML(typ="safe", pure=True).load(path)
    except (OSError, YAMLError, UnicodeDecodeError) as error:
        raise ParamsRefusedError(
            f"{path} cannot be read as YAML ({type(error).__name__}); correct it."
        ) from None
    if not isinstance(document, Mapping):
        raise ParamsRefusedError(
            f"{path.name} must hold space, epsilon and what else a search needs; correct it."
        )
    try:
        return Tuning.model_validate(dict(document))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "the whole"
        raise ParamsRefusedError(f"{path.name}: {key}: {first['msg']}; correct it.") from None


Document = dict[str, Any]


def candidates(tuning: Tuning, base: Document) -> list[Document]:
    """params.yaml with each point of the space in its place; what a run is named by is never in a space."""
    lists = [value.values() if isinstance(value, Range) else value for value in tuning.space.values()]
    for key, values in zip(tuning.space, lists, strict=True):
        if key.partition(".")[0] not in ("algorithm", "model", "features") or not values:
            raise ParamsRefusedError(
                f"the space has {key}; give values of keys of algorithm, model or features, at least one each."
            )
    if (size := math.prod(map(len, lists))) > _LARGEST_SPACE:
        raise ParamsRefusedError(
            f"the space has {size} settings, at most {_LARGEST_SPACE} are searched; coarsen it."
        )
    return [_with(base, dict(zip(tuning.space, point, strict=True))) for point in product(*lists)]


def _with(base: Document, values: Mapping[str, Any]) -> Document:
    document: Document = json.loads(json.dumps(base))
    for key, value in values.items():
        *parents, last = key.split(".")
        place = document
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    return document


@dataclass(frozen=True)
class Priced:
    """What a search costs and what a trial may: the plan's document of each candidate, and the event of the whole.

    shows_all: whether every trial may be shown. each: epsilon of one trial by itself. costs: of the whole, by
    accountant; the least one is its cost. schedule: what is charged, what is learned once for all trials and then the
    search. shares: whether anything is.
    """

    shows_all: bool
    each: float
    costs: Mapping[str, float]
    schedule: Schedule
    shares: bool
    documents: tuple[Document, ...]
    plans: tuple[Document, ...]

    @property
    def accountant(self) -> Accountant:
        """By which the whole costs least."""
        return cast(Accountant, min(self.costs, key=self.costs.__getitem__))

    @property
    def cost(self) -> float:
        """Epsilon of the whole."""
        return self.costs[self.accountant]


def price(tuning: Tuning, base: Document, public: PublicDescription) -> Priced:
    """The largest epsilon of a trial with which the whole fits; plans alone, nothing is spent.

    Raises RefusedError where a trial's releases are not fixed in advance, or none fits.
    """
    if tuning.show_all == "cheaper":
        return max(filter(None, both_ways(tuning, base, public)), key=lambda way: way.each)
    base = _with(base, {"privacy.target": None, "privacy.delta": tuning.delta or base["privacy"]["delta"]})
    if tuning.objective.on == "public" and not public.public and public.holdout != "public":
        raise RefusedError(
            f"the card of {public.dataset!r} declares no public held-out records; set objective.on to private."
        )
    every = candidates(tuning, base)
    if tuning.objective.on == "private":
        _check_scored(every, public)
    return _priced(tuning, every, public, shows_all=tuning.show_all)


def both_ways(tuning: Tuning, base: Document, public: PublicDescription) -> "list[Priced | None]":
    """The price with the winner alone, then with all trials shown; None for one that does not fit.

    Raises RefusedError, of the first, where neither fits.
    """
    ways: list[Priced | None] = []
    refusals = []
    for shows_all in (False, True):
        try:
            ways.append(price(tuning.model_copy(update={"show_all": shows_all}), base, public))
        except RefusedError as refusal:
            ways.append(None)
            refusals.append(refusal)
    if len(refusals) == len(ways):
        raise refusals[0]
    return ways


def _check_scored(every: Sequence[Document], public: PublicDescription) -> None:
    """That each model can be asked about a record by itself, on made-up zeros; an error would come after the charge."""
    asked = {json.dumps({group: d[group] for group in ("model", "features") if group in d}): d for d in every}
    example = Records(
        np.zeros((1, *public.input_shape), np.float32 if public.tokens is None else np.int32),
        np.zeros((1, *public.label_shape), public.known.label_dtype),
    )
    for document in asked.values():
        model = model_for(params.parse(document, reads=READS), public)
        try:
            shape_of(scored(public, model, model.published(model.initial_parameters())), example, model)
        except Exception as error:
            why = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise RefusedError(
                f"the model {model.name!r} cannot be asked about one record by itself ({why}); set objective.on to"
                " public."
            ) from None


def scored(public: PublicDescription, model: Model, parameters: Mapping[str, torch.Tensor]) -> Statistic:
    """How good what the model says of a record is, [1], as a barrier sums it up."""

    def of_batch(features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return record_scores(public.known, model.scores(model.outputs(parameters, features)), labels)[:, None]

    return lambda features, label: _OfBatch.apply(of_batch, features, label)  # type: ignore[no-untyped-call]


class _OfBatch(torch.autograd.Function):
    """A function of a batch, record by record, as one of a record: vmap asks it of the whole batch.

    Models of libraries look into their inputs, which vmap forbids.
    """

    @staticmethod
    def forward(run: Statistic, features: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return run(features[None], label[None])[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is kept, since no gradient is taken."""

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, run: Statistic, features: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, int]:
        return run(features, labels), 0


def _priced(tuning: Tuning, every: list[Document], public: PublicDescription, *, shows_all: bool) -> Priced:
    delta = every[0]["privacy"]["delta"]

    def at(each: float) -> Priced:
        documents = [_with(d, {"privacy.epsilon": each, "privacy.accountant": "pld"}) for d in every]
        plans = [calibrate(params.parse(d, reads=READS), public) for d in documents]
        shared = schedule_from_json(plans[0]["prior_events"]) if shares_features(tuning, documents[0]) else []
        schedules = [after_shared(trial_schedule(plan, tuning.objective), shared) for plan in plans]
        adjacencies = {plan["adjacency"] for plan in plans}
        if len(adjacencies) > 1:
            raise RefusedError("the space has methods under different adjacencies; search each by itself.")
        whole = all_shown(schedules) if shows_all else tuning.trials.trials().event(schedules)
        charged = [*shared, (whole, 1)]
        costs = by_accountants(charged, delta, adjacency_named(adjacencies.pop()))
        if not costs:
            raise RefusedError("no accountant has a bound for a search of this method; take another method.")
        return Priced(shows_all, each, costs, charged, bool(shared), tuple(documents), tuple(plans))

    # Between an epsilon of a trial that is too low, or fits, and one that is too dear, each with what the whole costs.
    each, low, high, best = tuning.epsilon, (0.0, 0.0), (tuning.epsilon, math.inf), None
    for tried in range(_TRIES):
        try:
            found = at(each)
        except RefusedError:  # as where features alone cost more than that
            if tried == 0:
                raise
            low = each, each
        else:
            if found.cost > tuning.epsilon:
                high = each, found.cost
            else:
                low, best = (each, found.cost), found
        if best is not None and (best.cost > _NEAR * tuning.epsilon or best.each == tuning.epsilon):
            break
        share = ((1 + _NEAR) / 2 * tuning.epsilon - low[1]) / (high[1] - low[1])
        if not 0 < share < 1 or tried >= _TRIES / 2:
            share = 0.5
        each = low[0] + share * (high[0] - low[0])
    if best is None:
        raise RefusedError(
            f"no trial is cheap enough for a search of epsilon {tuning.epsilon:g}; ask for more, or fewer trials."
        )
    return best


def shares_features(tuning: Tuning, document: Document) -> bool:
    """Whether what is learned about the features is the same for every trial, so that it is released once for all.

    Where training starts is learned with them, and is the model's; so neither may be in the space.
    """
    name = (document.get("features") or {}).get("name", "none")
    return name != "none" and {"features", "model"}.isdisjoint(key.partition(".")[0] for key in tuning.space)


def trial_schedule(plan: Document, objective: Objective) -> Schedule:
    if plan["filter"]["kind"] != "schedule":
        raise RefusedError(
            f"the method {plan['algorithm']!r} chooses its releases on the way, and a search prices fixed ones;"
            " take another method."
        )
    schedule = schedule_from_json(plan["schedule"])
    if objective.on == "public":
        return schedule
    if any("WithoutReplacement" in type(event).__name__ for event, _ in schedule):
        raise RefusedError(
            "samples without replacement need the exact number of records, and a private objective takes some away;"
            " set objective.on to public."
        )
    return [*schedule, (score_release(objective).event(), 1)]


def score_release(objective: Objective) -> Any:
    return total_release(L2(1.0), Gaussian(objective.noise_multiplier))

"""The plan of a search: the largest epsilon per trial that its budget holds, and what the scores cost."""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

from algorithms.core.plan import Plan, by_accountants
from algorithms.core.private_evaluation import EvaluationPlan
from algorithms.errors import RefusedError
from algorithms.gradients import L2
from algorithms.privacy.accounting.epsilon import ADD_OR_REMOVE_ONE, Accountant, adjacency_named
from algorithms.privacy.accounting.events import Schedule, after_shared, all_shown, schedule_from_json
from algorithms.privacy.accounting.filters import FIXED
from algorithms.privacy.accounting.noise_search import search_outwards
from algorithms.privacy.barrier.statistics import example_of
from algorithms.privacy.documents import PlanDocument
from algorithms.privacy.mechanisms.release import Gaussian, total_release
from data import DatasetInfo
from data.documents import Document
from tasks.calibrate import calibrate, histogram_of, price_ratios
from tasks.config import params
from tasks.config.overrides import with_values
from tasks.config.params import Params
from tasks.model_building import model_for
from tasks.tuning.gaussian_search import EpsilonGuesses, GaussianSearch
from tasks.tuning.scoring import record_of_zeros, score_statistic
from tasks.tuning.settings import READS, SearchObjective, Tuning, candidates

_MAX_PLANS, _MAX_GUESSES, _NEAR_TARGET = 16, 4, 0.98
_AIM_SHARE = (1 + _NEAR_TARGET) / 2
"""The share of the search's epsilon that is aimed at."""
_EVALUATION_WASTE = 1e-3
"""How far, relatively, the score's noise may be above the least."""


@dataclass(frozen=True)
class SearchPlan:
    """The price of a search and of its trials.

    releases_all: whether all trials are released. epsilon_per_trial: epsilon of a single trial. costs: of the whole
    search, by accountant; the smallest is its cost. schedule: the charged events: features that are learned once for
    all trials, then the search. shares_features: whether there are such features. documents, plans: params.yaml and the
    plan's document of each candidate."""

    releases_all: bool
    epsilon_per_trial: float
    costs: Mapping[str, float]
    schedule: Schedule
    shares_features: bool
    documents: tuple[Document, ...]
    plans: tuple[PlanDocument, ...]

    @property
    def accountant(self) -> Accountant:
        """The accountant with the smallest cost."""
        return cast(Accountant, min(self.costs, key=self.costs.__getitem__))

    @property
    def cost(self) -> float:
        """Epsilon of the whole search."""
        return self.costs[self.accountant]


def plan_search(tuning: Tuning, base: Document, info: DatasetInfo) -> SearchPlan:
    """Find the largest epsilon per trial with which the whole search fits; only plans are made, nothing is spent.

    Raises RefusedError if a trial's releases are not fixed in advance, or no epsilon fits.
    """
    if tuning.show_all == "cheaper":
        return max(
            filter(None, plan_options(tuning, base, info)), key=lambda option: option.epsilon_per_trial
        )
    base = with_values(
        base, {"privacy.target": None, "privacy.delta": tuning.delta or base["privacy"]["delta"]}
    )
    wanted = (base["privacy"].get("evaluation") or {}).get("epsilon")
    base = base | {"privacy": {key: value for key, value in base["privacy"].items() if key != "evaluation"}}
    if tuning.objective.on == "held_out" and info.holdout != "private":
        raise RefusedError(
            "the held-out records of {dataset!r} are public, so that trials need no noise to be scored on them;"
            " set objective.on to public.",
            code="bad_keys",
            dataset=info.dataset,
            keys=("objective.on",),
        )
    if tuning.objective.on == "public" and not info.is_public and info.holdout != "public":
        raise RefusedError(
            "the card of {dataset!r} declares no public held-out records; set objective.on to held_out.",
            code="bad_keys",
            dataset=info.dataset,
            keys=("objective.on",),
        )
    every = candidates(tuning, base)
    if tuning.objective.on == "private":
        _check_scored(every, info)
    search_plan = _fit_search_plan(tuning, every, info, releases_all=tuning.show_all)
    if tuning.objective.on != "held_out":
        return search_plan
    return _add_evaluation(search_plan, tuning, info, wanted)


def _add_evaluation(
    search_plan: SearchPlan, tuning: Tuning, info: DatasetInfo, wanted: float | None
) -> SearchPlan:
    """The same search whose trials are scored on private held-out people, by the least noise that costs nothing more.

    For them the search is one of evaluations, as it is one of trainings for those trained on, so it costs the larger of
    the two searches: by the search's accountant, by PLD, which the card states for them, and in the ledger. wanted: the
    epsilon that they may lose at most.
    """
    first = Plan.from_document(search_plan.plans[0])
    delta, adjacency = first.target.budget.delta, adjacency_named(first.adjacency)
    trials = len(search_plan.plans) if search_plan.releases_all else tuning.trials.trials()
    spec, deciding = (
        histogram_of(info.label_type),
        {search_plan.accountant, "pld"} & search_plan.costs.keys(),
    )
    trained = replace(first, schedule=search_plan.schedule, epsilon=search_plan.costs)
    in_ledger = price_ratios(trained, info)

    def at(noise: float, epsilon: float = 0.0) -> EvaluationPlan:
        return EvaluationPlan(spec, "gaussian", noise, epsilon, trials)

    def costs(noise: float) -> dict[str, float]:
        return by_accountants(at(noise).schedule, delta, adjacency)

    def largest_ratio(noise: float) -> float:
        largest = max((ratio(at(noise).schedule) for ratio in in_ledger), default=0.0)
        if largest > 1.0:  # the accountants take longer
            return largest
        each = costs(noise)
        return max(
            largest, *(each[name] / min(search_plan.costs[name], wanted or math.inf) for name in deciding)
        )

    start = first.noise_multiplier or 1.0
    noise = search_outwards(largest_ratio, 1.0, start=start, factor=1.2, tolerance=_EVALUATION_WASTE)
    each = costs(noise)
    stated = at(noise, max(each[name] for name in deciding)).to_document()
    return replace(
        search_plan,
        costs={name: max(cost, each[name]) for name, cost in search_plan.costs.items() if name in each},
        plans=tuple(plan.model_copy(update={"evaluation": stated}) for plan in search_plan.plans),
    )


def plan_options(tuning: Tuning, base: Document, info: DatasetInfo) -> "list[SearchPlan | None]":
    """The price if only the winner is released, and if all trials are shown; None for one that does not fit.

    Raises the first RefusedError if neither fits.
    """
    options: list[SearchPlan | None] = []
    refusals = []
    for releases_all in (False, True):
        try:
            options.append(plan_search(tuning.model_copy(update={"show_all": releases_all}), base, info))
        except RefusedError as refusal:
            options.append(None)
            refusals.append(refusal)
    if len(refusals) == len(options):
        raise refusals[0]
    return options


def _check_scored(every: Sequence[Document], info: DatasetInfo) -> None:
    """Check on a record of zeros that each model can score a single record: a later error would follow the charge."""
    for settings in distinct_models(every):
        model = model_for(settings, info)
        try:
            score = score_statistic(info, model, model.published_tensors(model.initial_parameters()), size=1)
            example_of(score, record_of_zeros(info), model)
        except Exception as error:
            why = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise RefusedError(
                "the model {model!r} cannot be asked about one record by itself ({why}); set objective.on to"
                " public.",
                code="bad_keys",
                model=model.name,
                why=why,
                keys=("objective.on",),
            ) from None


def distinct_models(every: Sequence[Document]) -> Iterator[Params]:
    """Yield the settings of one candidate for each distinct model and kind of learned features."""
    seen = set()
    for document in every:
        decides = json.dumps({group: document[group] for group in ("model", "features") if group in document})
        if decides not in seen:
            seen.add(decides)
            yield params.parse(document, reads=READS)


def without_evaluation(info: DatasetInfo) -> DatasetInfo:
    """The description by which trials are planned: private held-out records are not evaluated in a search."""
    return replace(info, holdout="public")


def _fit_search_plan(
    tuning: Tuning, every: list[Document], info: DatasetInfo, *, releases_all: bool
) -> SearchPlan:
    """Plan with the largest epsilon per trial that fits.

    The price is mostly that of the first or the last setting, so these are tried by themselves first.
    """
    trials = None if releases_all else tuning.trials.trials()
    like = GaussianSearch(every[0]["privacy"]["delta"], trials, len(every))
    guesses = EpsilonGuesses(like, _AIM_SHARE * tuning.epsilon, tuning.epsilon)
    tries = iter(range(_MAX_PLANS))

    def largest_of(documents: list[Document], first: float, tries: Iterable[int]) -> SearchPlan | None:
        plan_at = partial(_plan_at, tuning=tuning, every=documents, info=info, releases_all=releases_all)
        return _largest_that_fits(plan_at, tuning.epsilon, guesses, first=first, tries=tries)

    ends = every if releases_all else every[:: max(1, len(every) - 1)]
    best = largest_of(ends, guesses.first(), tries)
    if best is not None and len(ends) < len(every):
        best = largest_of(every, best.epsilon_per_trial, [*tries] or range(_MAX_PLANS // 2, _MAX_PLANS))
    if best is None:
        raise RefusedError(
            "no trial is cheap enough for a search of epsilon {epsilon:g}; ask for more, or fewer trials.",
            code="bad_keys",
            epsilon=tuning.epsilon,
            keys=("epsilon", "trials"),
        )
    return best


def _largest_that_fits(
    plan_at: Callable[[float], SearchPlan],
    largest: float,
    guesses: EpsilonGuesses,
    *,
    first: float,
    tries: Iterable[int],
) -> SearchPlan | None:
    """The plan whose price comes near `largest`; None if none below it was found in these tries.

    Its epsilon per trial is bracketed between one that fits, or is too low, and one that costs too much.
    """
    each, low, high, best = first, (0.0, 0.0), (largest, math.inf), None
    for tried in tries:
        guess = None
        try:
            plan = plan_at(each)
        except RefusedError:  # for example if features alone cost more than that
            if each == largest and best is None:
                raise
            if high[1] == math.inf and best is None:
                guess = largest
            low = each, each
        else:
            if plan.cost > largest:
                high = each, plan.cost
            else:
                low, best = (each, plan.cost), plan
            if tried < _MAX_GUESSES:
                guess = guesses.after(each, plan.cost)
        if best is not None and (best.cost > _NEAR_TARGET * largest or best.epsilon_per_trial == largest):
            break
        # By the line through both ends of the bracket; by halves where it says nothing, or has been slow.
        share = (_AIM_SHARE * largest - low[1]) / (high[1] - low[1])
        if not 0 < share < 1 or tried >= _MAX_PLANS / 2:
            share = 0.5
        each = low[0] + share * (high[0] - low[0])
        if guess is not None and (low[0] < guess < high[0] or (guess == largest and high[1] == math.inf)):
            each = guess
    return best


def _plan_at(
    epsilon: float, tuning: Tuning, every: list[Document], info: DatasetInfo, *, releases_all: bool
) -> SearchPlan:
    """The plan of the search whose trials have this epsilon."""
    documents = [with_values(d, {"privacy.epsilon": epsilon, "privacy.accountant": "pld"}) for d in every]
    plans = [calibrate(params.parse(d, reads=READS), without_evaluation(info)) for d in documents]
    shared = schedule_from_json(plans[0].prior_events) if shares_features(tuning, documents[0]) else []
    schedules = [after_shared(trial_schedule(plan, tuning.objective), shared) for plan in plans]
    adjacencies = {plan.adjacency for plan in plans}
    if len(adjacencies) > 1:
        raise RefusedError(
            "the space has methods under different adjacencies; search each by itself.",
            code="bad_keys",
            keys=("space",),
        )
    whole = all_shown(schedules) if releases_all else tuning.trials.trials().event(schedules)
    charged = [*shared, (whole, 1)]
    costs = by_accountants(charged, every[0]["privacy"]["delta"], adjacency_named(adjacencies.pop()))
    if not costs:
        raise RefusedError(
            "no accountant has a bound for a search of this method; take another method.", code="method_unfit"
        )
    return SearchPlan(releases_all, epsilon, costs, charged, bool(shared), tuple(documents), tuple(plans))


def shares_features(tuning: Tuning, document: Document) -> bool:
    """Whether the learned features are the same for every trial, so that they are released once for all trials.

    The initial parameters may be learned with the features and belong to the model, so neither features nor model may
    be in the space.
    """
    name = (document.get("features") or {}).get("name", "none")
    return name != "none" and {"features", "model"}.isdisjoint(key.partition(".")[0] for key in tuning.space)


def trial_schedule(plan: PlanDocument, objective: SearchObjective) -> Schedule:
    """The releases of the training records in one trial."""
    if plan.filter != FIXED:
        raise RefusedError(
            "the method {method!r} chooses its releases on the way, and a search prices fixed ones;"
            " take another method.",
            code="method_unfit",
            method=plan.algorithm,
        )
    schedule = schedule_from_json(plan.schedule)
    if objective.on == "held_out" and plan.adjacency != ADD_OR_REMOVE_ONE.name:
        raise RefusedError(
            "a record that is replaced can change sides, so that it could be in a trial's training and in its score;"
            " set objective.on to private, or algorithm.adjacency to {adjacency}.",
            code="bad_keys",
            adjacency=ADD_OR_REMOVE_ONE.name,
            keys=("objective.on", "algorithm.adjacency"),
        )
    if objective.on != "private":
        return schedule
    if any("WithoutReplacement" in type(event).__name__ for event, _ in schedule):
        raise RefusedError(
            "samples without replacement need the exact number of records, and a private objective takes some away;"
            " set objective.on to public.",
            code="bad_keys",
            keys=("objective.on",),
        )
    return [*schedule, (score_release(objective).event(), 1)]


def score_release(objective: SearchObjective) -> Any:
    """The release of a trial's score on records that are set aside: a sum to which each adds at most 1."""
    return total_release(L2(1.0), Gaussian(objective.noise_multiplier))

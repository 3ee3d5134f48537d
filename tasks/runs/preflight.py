"""Check settings, plan, files and ledger before anything starts, for reasons to refuse or question a run.

The stages check everything again; `preview_run` saves the person the wait.

Settings that look wrong are questioned before anything is reserved, since a budget that buys only noise is spent, too.
They are judged only by public values: the plan, the settings, and the number of records or its bound on the data card.
A person at a terminal is asked; without a terminal the run is refused, unless TRAIN_ANYWAY is set. For public records a
line of the log is enough. The limits are far beyond useful settings; the numbers behind them are in
docs/results/defaults.md.

At last, before the charge, a run is rehearsed: its card and page are made with made-up results.
"""

import logging
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from algorithms.core.optimizers import OptimizerConfig
from algorithms.core.plan import Plan
from algorithms.core.receipt import reserved_events
from algorithms.core.rehearsal import made_up, rehearsal
from algorithms.errors import BudgetRefusedError, RefusedError
from algorithms.gradients.devices import device_of
from algorithms.plain_text import for_terminal
from algorithms.privacy.accounting import Budget
from algorithms.privacy.accounting.events import Schedule
from algorithms.privacy.ledger import WHOLE_POPULATION, Balance
from algorithms.privacy.ledger.composition import Composition, Terms, times
from algorithms.privacy.ledger.location import check_location
from algorithms.privacy.ledger.planned_runs import ChosenComposition
from data import DatasetInfo
from data.card import DataRefusedError, card_names, data_card
from data.files import OWNER_KEY, check_local, owner_key
from tasks.calibrate import document_of, plan_for
from tasks.card_questions import questions_about
from tasks.config import SPEND_AGAIN, TRAIN_ANYWAY, database_url, has_consent, home
from tasks.config.params import Params
from tasks.prepare import chosen_blocks, public_of
from tasks.runs.earlier_plans import earlier_plan
from tasks.runs.ledger import check_terms, composition_for, missing_blocks, open_ledger, plan_composition

if TYPE_CHECKING:
    from tasks.report import Run

MIN_SIGNAL = 1.0
"""The required ratio of the sum of all clipped gradients, if all are equal, to the total noise on it."""
MAX_STEP = 1000.0
"""How far one step may move the parameters, including momentum. The usual settings: 3 by noise, 80 by gradients."""
MIN_DISTANCE = 0.01
"""How far all steps together must be able to move the parameters. The usual settings can go 10 to 10,000."""

_RUNS_SHOWN = 1, 11
"""After how many runs like the planned one a preview says what is spent: after it, and after ten more."""

_LOG = logging.getLogger(__name__)
_NO_HEAD = "0" * 64
_SOFTWARE = {
    "recorded": "training",
    "version": "0",
    "code": _NO_HEAD,
    "python": "3",
    "packages": {"torch": "2"},
    "git": None,
}


def sanity_warnings(settings: Params, plan: Plan, records: int | None) -> list[str]:
    """Reasons why the run will hardly give a useful model, each as a clause that says what to change.

    records: the number of records, or a bound on it; None if nothing is known.
    """
    update = getattr(settings.algorithm, "update", None)
    warnings = [_epsilon_warning(plan, records, descends=update is not None)]
    if isinstance(update, OptimizerConfig):
        warnings += _learning_rate_warnings(
            update, plan, getattr(settings.algorithm, "clip_norm", 1.0), records
        )
    return [warning for warning in warnings if warning]


def _epsilon_warning(plan: Plan, records: int | None, *, descends: bool) -> str | None:
    """Doubt a run whose noise exceeds its signal.

    A Gaussian release with noise multiplier sqrt(2 log(1.25 / delta)) / epsilon costs about (epsilon, delta), however
    it is divided into steps. If parameters are released, the noise has a component for each parameter.
    """
    budget, parameters = plan.target.budget, plan.facts.parameters if descends else 1
    if records is None or math.isinf(plan.cost.epsilon):
        return None
    noise = math.sqrt(2 * math.log(1.25 / budget.delta)) if budget.delta else 1.0
    signal = records * budget.epsilon / (noise * math.sqrt(parameters))
    if signal >= MIN_SIGNAL:
        return None
    return (
        f"at epsilon {budget.epsilon:.3g} the noise is {1 / signal:,.3g} times as large as all that {records:,} records"
        f" can say about {parameters:,} parameters (raise privacy.epsilon, or take a smaller model)"
    )


def _learning_rate_warnings(
    update: OptimizerConfig, plan: Plan, clip_norm: float, records: int | None
) -> list[str]:
    parameters = plan.facts.parameters
    batch = plan.divisor or plan.sampling_rate * (records or math.inf)
    if update.optimizer == "adam":  # a step of about the learning rate in each coordinate, for any gradient
        gradient = longest = update.learning_rate * math.sqrt(parameters)
    else:
        rate = update.learning_rate / (1 - update.momentum)
        gradient = rate * clip_norm
        longest = gradient * max(1.0, (plan.fixed_noise or 0.0) * math.sqrt(parameters) / batch)
    way = gradient * plan.steps * (1.0 if update.schedule == "constant" else 0.5)
    warnings = []
    if longest > MAX_STEP:
        warnings.append(
            f"at a learning rate of {update.learning_rate:g} one step moves the parameters by up to {longest:,.3g},"
            " far beyond where those of a model lie (lower algorithm.update.learning_rate)"
        )
    if way < MIN_DISTANCE:
        warnings.append(
            f"{plan.steps:,} steps at a learning rate of {update.learning_rate:g} move the parameters by at most"
            f" {way:.3g}, so that the model stays where it starts (raise algorithm.update.learning_rate or"
            " algorithm.steps)"
        )
    return warnings


def records_of(public: DatasetInfo, cards: Path) -> int | None:
    """The number of training records, or the bound that the card in `cards` declares; None without either."""
    if public.records is not None or public.dataset not in card_names(cards):
        return public.records
    return data_card(public.dataset, cards).records.at_most


def confirm_or_refuse(warnings: Sequence[str], public: DatasetInfo, *, epsilon: float) -> None:
    """Ask a person whether to run in spite of the warnings; raises RefusedError unless somebody agrees.

    For public records the warnings are only logged.
    """
    if public.is_public:
        for warning in warnings:
            _LOG.warning("these settings look wrong: %s.", warning)
    elif warnings and not has_consent(TRAIN_ANYWAY):
        reasons = "; and ".join(warnings)
        if not confirm(
            f"these settings look wrong: {reasons}. Spend epsilon {epsilon:g} all the same? [y/N] "
        ):
            raise RefusedError(
                f"these settings look wrong, and would spend epsilon {epsilon:g}: {reasons}; or set {TRAIN_ANYWAY}=yes"
                " to train all the same."
            )


def confirm(question: str) -> bool:
    """Whether a person at this terminal says yes; False without a terminal."""
    if not sys.stdin.isatty():
        return False
    sys.stderr.write(for_terminal(question))
    sys.stderr.flush()
    try:
        return sys.stdin.readline().strip().lower() in ("y", "yes")
    except OSError:  # a terminal of another session
        return False


def confirm_repeat(what: str, doing: str, epsilon: float, *, has_result: bool, or_else: str = "") -> bool:
    """Whether a person agrees to repeat what is already charged, and to charge it again.

    what: its name and id. doing: what is repeated. or_else: what to do instead. Raises RefusedError if nobody agrees
    and there is no result.
    """
    if has_consent(SPEND_AGAIN) or confirm(
        f"identical {what} exists; {doing} again spends another epsilon={epsilon:g}. Continue? [y/N] "
    ):
        return True
    if has_result:
        return False
    raise RefusedError(
        f"identical {what} exists, and {doing} again would spend another epsilon={epsilon:g}; {or_else}set"
        f" {SPEND_AGAIN}=yes."
    )


def confirm_before_stages(warnings: Sequence[str], public: DatasetInfo, *, epsilon: float) -> None:
    """Ask the question for a run on private records before its stages start, since stages cannot ask.

    This process and its child processes do not ask again. Raises RefusedError unless somebody agrees.
    """
    if warnings and not public.is_public and not has_consent(TRAIN_ANYWAY):
        confirm_or_refuse(warnings, public, epsilon=epsilon)
        os.environ[TRAIN_ANYWAY] = "yes"


@dataclass(frozen=True)
class RunPreview:
    """What is known about a run before it starts.

    warnings: reasons why it will hardly give a useful model. cap: of the population. balance: None if the population
    was never charged. fits: how many runs like this the caps allow; None for any number. is_begun: whether a run of
    exactly this cost, or one for the same request under other software, was reserved before. This may be the same run,
    which is then resumed or returned at no cost. composition: how runs on the population add up. spent_after: what is
    spent of the cap after this run, and after ten more like it; empty for a run that does not fit or has no noise.
    chosen: what decides for the composition, if the card plans a number of runs and this is the first. questions: what
    the data card leaves open."""

    public: DatasetInfo
    plan: Plan
    warnings: tuple[str, ...]
    cap: Budget
    balance: Balance | None
    fits: int | None
    is_begun: bool
    composition: Composition
    spent_after: tuple[Budget, ...] = ()
    chosen: ChosenComposition | None = None
    questions: tuple[str, ...] = ()

    def check(self) -> None:
        """Raise BudgetRefusedError if the population cannot pay for the run."""
        if self.fits != 0 or self.is_begun:
            return
        cost, population = self.plan.cost, self.public.population
        if self.balance is None:
            left, raised = self.cap, "`cap` in the data card."
        else:
            left, raised = (
                self.balance.remaining,
                f"the cap: epsilonflow ledger cap {population} --epsilon E --delta D",
            )
        raise BudgetRefusedError(
            f"this costs epsilon {cost.epsilon:g} at delta {cost.delta:g}, and population {population!r}"
            f" has epsilon {left.epsilon:.4g} and delta {left.delta:.4g} left of its cap; ask for a smaller epsilon, or"
            f" let the owner raise {raised}"
        )


def preview_run(root: Path, settings: Params) -> RunPreview:
    """The preview of the run that `settings` describe in the checkout at `root`; spends nothing and uses no record.

    Raises what `plan_for` raises; DataRefusedError for an unknown data set, or a file that is missing or not the
    declared one; and RefusedError if the population is charged in another ledger or on other terms.
    """
    cards = root / "data" / "cards"
    card = data_card(settings.data.dataset, cards)
    public = public_of(card, settings.data)
    plan = plan_for(settings, public)
    folder = home()
    check_local(card, root, key=owner_key(folder) if (folder / OWNER_KEY).exists() else None)
    if settings.data.blocks:
        chosen_blocks(card, settings.data.blocks, root=root)
    device_of(settings.performance.device)
    warnings = sanity_warnings(settings, plan, records_of(public, cards))
    balances = preview_ledger(root, settings, public, plan, warnings)
    questions = questions_about(card)
    if card.blocks is not None and balances.balance is not None and not settings.data.blocks:
        from data.reading import block_names  # imports readers of all kinds, which most data sets do not need

        names = block_names(card, root=root, url=database_url(card.blocks))
        questions += filter(None, [missing_blocks(open_ledger(root, settings), card.population, names)])
    return replace(balances, questions=tuple(questions))


def preview_ledger(
    root: Path, settings: Params, public: DatasetInfo, plan: Plan, warnings: Sequence[str] = ()
) -> RunPreview:
    """The preview of a planned run or search.

    Raises RefusedError if the population is charged in another ledger, on other terms, or by blocks that the card
    lacks.
    """
    ledger, population = open_ledger(root, settings), public.population
    check_location(ledger, population, public=public.is_public, home=home())
    if population not in ledger.populations():
        return _preview_new_population(settings, public, plan, warnings)
    if ledger.is_charged(population):
        check_terms(ledger, public)
    blocks = [block.name for block in ledger.blocks(population)]
    if public.blocks_by is None and blocks != [WHOLE_POPULATION]:
        raise RefusedError(
            f"the population {population!r} is charged by blocks ({', '.join(blocks[:3])}), but the card of"
            f" {public.dataset!r} charges it as a whole; declare `blocks` in the card or, for other people only,"
            " give it a population of its own."
        )
    balance, events = ledger.balance(population), reserved_events(plan)
    named = [block for block in blocks if block in settings.data.blocks]
    fits = ledger.affordable(population, plan.cost, events=events, adjacency=plan.adjacency, blocks=named)
    after: tuple[Budget, ...] = ()
    if fits != 0 and math.isfinite(plan.cost.epsilon):
        after = ledger.spent_after(
            population, plan.cost, runs=_RUNS_SHOWN, events=events, adjacency=plan.adjacency, blocks=named
        )
    rows = ledger.history(population)
    is_begun = any(row.kind == "reserve" and row.budget == plan.cost for row in rows)
    is_begun = is_begun or _has_earlier_plan(root, settings, plan)
    return RunPreview(
        public,
        plan,
        tuple(warnings),
        balance.cap,
        balance,
        fits,
        is_begun,
        balance.composition,
        spent_after=after,
    )


def _has_earlier_plan(root: Path, settings: Params, plan: Plan) -> bool:
    """Whether a run on the prepared records asked for the same under other software, whose plan is taken over."""
    prepared = root / "datasets" / "prepared"
    try:
        public = DatasetInfo.read(prepared)
    except DataRefusedError:  # not prepared yet
        return False
    document = document_of(plan, settings, public)
    return earlier_plan(document, settings.model, public, home=home(), prepared=prepared) is not None


def _preview_new_population(
    settings: Params, public: DatasetInfo, plan: Plan, warnings: Sequence[str]
) -> RunPreview:
    """The preview of the first run on a population."""
    cap, chosen = Budget(public.cap_epsilon, public.cap_delta), plan_composition(public, plan)
    composition = composition_for(public, chosen)
    terms = Terms(public.is_public, composition, public.blocks_per_person)
    blocks = settings.data.blocks or (WHOLE_POPULATION,)
    fits: int | None = None
    after: tuple[Budget, ...] = ()
    if math.isfinite(plan.cost.epsilon):
        charge = terms.planned_charge(plan.cost, reserved_events(plan), plan.adjacency, blocks)
        limit = composition.amount_of(cap)
        is_too_much = any(part > cap_part for part, cap_part in zip(charge, limit, strict=True))
        fits = 0 if is_too_much and not public.is_public else None
        after = tuple(composition.as_budget(times(charge, count), cap.delta) for count in _RUNS_SHOWN)
    return RunPreview(
        public,
        plan,
        tuple(warnings),
        cap,
        None,
        fits,
        False,
        composition,
        spent_after=after,
        chosen=chosen,
    )


def rehearse(
    plan: Mapping[str, Any],
    public: DatasetInfo,
    receipt: Mapping[str, Any],
    *,
    trial: Schedule | None = None,
    report: Callable[["Run"], object] | None = None,
) -> None:
    """Make the card and the page of a run that is not charged yet.

    plan: its document. receipt: the known part of its receipt. trial: for a search, the releases of the winner, which
    are in its trace. report: makes card and page, by default those of a run, whose figures are drawn. Everything else
    is made up: the releases of an adaptive plan, the population's account, the metrics. Raises RefusedError if the
    card, a figure or the page cannot be made, or the card would not verify.
    """
    from tasks.report import compose  # plans do without, and without pandas
    from tasks.reporting import nothing
    from tasks.reporting.figures import rehearse_picture

    run = _rehearsal_run(plan, public, receipt, trial)
    with rehearsal():
        if report is not None:
            report(run)
        else:
            compose(run, nothing(), folder=None, draw=rehearse_picture, key=None)


def _rehearsal_run(
    document: Mapping[str, Any], public: DatasetInfo, receipt: Mapping[str, Any], trial: Schedule | None
) -> "Run":
    import pandas as pd

    from tasks.report import Run
    from tasks.runs import quality

    cap = {"epsilon": public.cap_epsilon, "delta": public.cap_delta}
    planned = Plan.from_json(document)
    entries, columns = made_up(planned, cap=cap, trial=trial)
    trace, account = pd.DataFrame(columns), entries["ledger"]
    composition = composition_for(public, plan_composition(public, planned))
    entries["ledger"] = account | {"head": _NO_HEAD, "composition": composition.to_json()}
    if blocks := public.blocks:
        entries["ledger"] |= {
            "blocks_per_person": public.blocks_per_person,
            "blocks": [{"name": name} | account for name in blocks],
        }
    names = list(public.label_type.names) or ["all"]
    return Run(
        plan=document,
        receipt={**receipt, **entries, "software": _SOFTWARE, "releases": len(trace)},
        metrics=quality.placeholder_metrics(public.label_type.kind),
        public=public,
        trace=trace,
        pairs=pd.DataFrame({"actual": names, "predicted": names}),
        classes=pd.DataFrame({"class": names, "accuracy": 1.0, "records": 1}),
    )

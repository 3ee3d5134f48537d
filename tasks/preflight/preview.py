"""What a run would cost, what the ledger has left for it, and why it would be refused, before anything starts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from algorithms.core.plan import Plan
from algorithms.core.receipt import reserved_events
from algorithms.errors import BudgetRefusedError, RefusedError
from algorithms.privacy.accounting import Budget, rounded_up
from algorithms.privacy.ledger import (
    WHOLE_POPULATION,
    Balance,
    ChosenComposition,
    Composition,
    Terms,
    check_location,
    floor_to_6_digits,
    times,
)
from data import DatasetInfo
from data.card import DataCard, DataRefusedError, data_card
from data.files import OWNER_KEY, check_local, owner_key
from tasks.calibrate import document_of, plan_for, plan_of_earlier_run
from tasks.card_questions import questions_about
from tasks.config import database_url, home
from tasks.config.params import Params
from tasks.preflight.sanity import records_of, sanity_warnings
from tasks.prepare import chosen_blocks, info_of
from tasks.runs.ledger import (
    check_terms,
    composition_for,
    missing_blocks,
    open_ledger,
    open_runs,
    plan_composition,
)

_RUNS_SHOWN = 1, 11
"""After how many runs like the planned one a preview says what is spent: after it, and after ten more."""


@dataclass(frozen=True)
class RunPreview:
    """What is known about a run before it starts.

    warnings: reasons why it will hardly give a useful model. cap: of the population. balance: None if the population
    was never charged. fits: how many runs like this the caps allow; None for any number. is_begun: whether a run of
    exactly this cost, or one for the same request under other software, was reserved before. This may be the same run,
    which is then resumed or returned at no cost. composition: how runs on the population add up. spent_after: what is
    spent of the cap after this run, and after ten more like it; empty for a run without noise or a block that is left.
    open_runs: those that have reserved and not ended, if this run does not fit.
    chosen: what decides for the composition, if the card plans a number of runs and this is the first. questions: what
    the data card leaves open. held_out: about how many people are held out, at most; 0 if it is not known."""

    info: DatasetInfo
    plan: Plan
    warnings: tuple[str, ...]
    cap: Budget
    balance: Balance | None
    fits: int | None
    is_begun: bool
    composition: Composition
    spent_after: tuple[Budget, ...] = ()
    open_runs: tuple[str, ...] = ()
    chosen: ChosenComposition | None = None
    questions: tuple[str, ...] = ()
    held_out: int = 0

    def check(self) -> None:
        """Raise BudgetRefusedError if the population cannot pay for the run."""
        if self.fits != 0 or self.is_begun:
            return
        cost, population = self.plan.cost, self.info.population
        if self.balance is None:
            left, used, raised = self.cap, "", "`cap` in the data card"
        else:
            left, raised = (
                self.balance.remaining,
                f"it by `epsilonflow ledger cap {population} --epsilon E --delta D`",
            )
            names = (
                f" by runs that have not ended ({', '.join(self.open_runs[:3])})" if self.open_runs else ""
            )
            spent_so_far, reserved = self.balance.spent.epsilon, self.balance.reserved.epsilon
            used = (
                f" of epsilon {self.balance.cap.epsilon:g}, with {rounded_up(spent_so_far)} spent and"
                f" {rounded_up(reserved)} reserved{names}"
            )
        spent = ""
        if self.composition.kind != "basic" and self.spent_after:
            after = self.spent_after[0].epsilon
            spent = f", after which epsilon {rounded_up(after)} would be spent by {self.composition}"
        raise BudgetRefusedError(
            "this costs epsilon {epsilon:g} at delta {delta:g}{spent}, and population {population!r}"
            " has epsilon {left_epsilon:g} and delta {left_delta:g} left of its"
            " cap{used}; ask for a smaller epsilon, or let the owner raise {raised}.",
            code="above_cap",
            epsilon=cost.epsilon,
            delta=cost.delta,
            spent=spent,
            population=population,
            left_epsilon=floor_to_6_digits(left.epsilon),
            left_delta=floor_to_6_digits(left.delta),
            used=used,
            raised=raised,
        )


def preview_run(root: Path, settings: Params) -> RunPreview:
    """The preview of the run that `settings` describe in the checkout at `root`; spends nothing and uses no record.

    Raises what `plan_for` raises; DataRefusedError for an unknown data set, or a file that is missing or not the
    declared one; and RefusedError if the population is charged in another ledger or on other terms.
    """
    cards = root / "data" / "cards"
    card = data_card(settings.data.dataset, cards)
    info = info_of(card, settings.data)
    plan = plan_for(settings, info)
    folder = home()
    check_local(card, root, key=owner_key(folder) if (folder / OWNER_KEY).exists() else None)
    if settings.data.blocks:
        chosen_blocks(card, settings.data.blocks, root=root)
    _check_device(settings.performance.device)
    warnings = sanity_warnings(settings, plan, records_of(info, cards))
    balances = preview_ledger(root, settings, info, plan, warnings)
    questions = questions_about(card)
    if card.blocks is not None and balances.balance is not None and not settings.data.blocks:
        from data.reading import block_names  # imports readers of all kinds, which most data sets do not need

        names = block_names(card, root=root, url=database_url(card.blocks))
        questions += filter(None, [missing_blocks(open_ledger(root, settings), card.population, names)])
    return replace(balances, questions=tuple(questions), held_out=held_out_people(card))


def _check_device(name: str) -> None:
    """Raise RefusedError for an accelerator that this machine has not."""
    if name in ("auto", "cpu"):  # which are always there
        return
    from algorithms.privacy.barrier.device import device_of  # torch, which takes seconds to import

    device_of(name)


def held_out_people(card: DataCard) -> int:
    """About how many people are held out, at most, by the numbers that the card declares.

    Where several records of a person count as one, they are as many people as their records weigh in an evaluation.
    """
    records: float | None = card.records.test
    if records is None:
        share = 1.0 if card.split is None else card.split.test_fraction
        records = (card.records.at_most or 0) * share
    rows_per_user = None if card.person is None else card.person.rows_per_user
    return round(records / (rows_per_user or 1))


def preview_ledger(
    root: Path, settings: Params, info: DatasetInfo, plan: Plan, warnings: Sequence[str] = ()
) -> RunPreview:
    """The preview of a planned run or search.

    Raises RefusedError if the population is charged in another ledger, on other terms, or by blocks that the card
    lacks.
    """
    ledger, population = open_ledger(root, settings), info.population
    check_location(ledger, population, public=info.is_public, home=home())
    if population not in ledger.populations():
        return _preview_new_population(settings, info, plan, warnings)
    if ledger.is_charged(population):
        check_terms(ledger, info)
    blocks = [block.name for block in ledger.blocks(population)]
    if info.blocks_by is None and blocks != [WHOLE_POPULATION]:
        raise RefusedError(
            "the population {population!r} is charged by blocks ({blocks}), but the card of"
            " {dataset!r} charges it as a whole; declare `blocks` in the card or, for other people only,"
            " give it a population of its own.",
            code="unlike_population",
            population=population,
            blocks=", ".join(blocks[:3]),
            dataset=info.dataset,
            differing="blocks",
        )
    balance, events = ledger.balance(population), reserved_events(plan)
    named = [block for block in blocks if block in settings.data.blocks]
    fits = ledger.affordable_runs(
        population, plan.cost, events=events, adjacency=plan.adjacency, blocks=named
    )
    after: tuple[Budget, ...] = ()
    is_retired = not named and all(block.retired for block in ledger.blocks(population))
    if math.isfinite(plan.cost.epsilon) and not is_retired:
        after = ledger.spent_after(
            population, plan.cost, runs=_RUNS_SHOWN, events=events, adjacency=plan.adjacency, blocks=named
        )
    rows = ledger.history(population)
    is_begun = any(row.kind == "reserve" and row.budget == plan.cost for row in rows)
    is_begun = is_begun or _has_earlier_plan(root, settings, plan)
    return RunPreview(
        info,
        plan,
        tuple(warnings),
        balance.cap,
        balance,
        fits,
        is_begun,
        balance.composition,
        spent_after=after,
        open_runs=tuple(open_runs(rows)) if fits == 0 else (),
    )


def _has_earlier_plan(root: Path, settings: Params, plan: Plan) -> bool:
    """Whether a run on the prepared records asked for the same under other software, whose plan is taken over."""
    prepared = root / "datasets" / "prepared"
    try:
        info = DatasetInfo.read(prepared)
    except DataRefusedError:  # not prepared yet
        return False
    document = document_of(plan, settings, info)
    return plan_of_earlier_run(document, settings, info, prepared) is not None


def _preview_new_population(
    settings: Params, info: DatasetInfo, plan: Plan, warnings: Sequence[str]
) -> RunPreview:
    """The preview of the first run on a population."""
    cap, chosen = Budget(info.cap_epsilon, info.cap_delta), plan_composition(info, plan)
    composition = composition_for(info, chosen)
    terms = Terms(info.is_public, composition, info.blocks_per_person)
    blocks = settings.data.blocks or (WHOLE_POPULATION,)
    fits: int | None = None
    after: tuple[Budget, ...] = ()
    if math.isfinite(plan.cost.epsilon):
        charge = terms.planned_charge(plan.cost, reserved_events(plan), plan.adjacency, blocks)
        limit = composition.amount_of(cap)
        is_too_much = any(part > cap_part for part, cap_part in zip(charge, limit, strict=True))
        fits = 0 if is_too_much and not info.is_public else None
        after = tuple(composition.as_budget(times(charge, count), cap.delta) for count in _RUNS_SHOWN)
    return RunPreview(
        info,
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

"""A scheduled retraining: decide, run the five stages, compare with the model in use, promote or keep.

There is one retraining per period, however often it is delivered: this home records it, and the ledger charges a period
once. A retraining that was interrupted or ended by a fault is resumed first, unchanged, with the same noise and at no
extra cost, however long the fault lasts. Its reservation is forfeited only if a person gives it up, since the charge is
spent either way. Only runs of this home are forfeited, since a run of another home may still be running.

Which blocks a retraining uses, and the epsilon that all of them can pay, is decided first. A block's payment is in the
units of its composition, and is converted to an epsilon for the plan.
"""

import os
import shlex
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import takewhile
from pathlib import Path
from typing import Literal, TypeAlias

from algorithms.core.plan import Plan
from algorithms.errors import LedgerBrokenError, RefusedError
from algorithms.extension import NotUsableError
from algorithms.models import ModelRefusedError
from algorithms.models.saved import load_model
from algorithms.privacy.documents import Receipt
from algorithms.privacy.ledger import (
    BlockBalance,
    Ledger,
    NotAllowedError,
    Price,
    exhausted_blocks,
    forecast,
    next_retraining,
)
from data import DatasetInfo, dataset_info
from data.card import DataCard, data_card
from data.documents import load_yaml
from data.files import read_json
from data.reading import block_names
from tasks.calibrate import plan_for
from tasks.config import database_url, home, params, retraining_for
from tasks.config.overrides import ParamOverrides, ParamsEdit, params_edit
from tasks.config.own_code import named_code
from tasks.config.params import ParamsRefusedError
from tasks.config.temporary_params import check_params, override_params, restore_params
from tasks.evaluate import metrics_of
from tasks.model_file import check_comparable
from tasks.preflight.preview import held_out_people
from tasks.preflight.registration import planned_run
from tasks.prepare import info_of
from tasks.refusals import PIPELINE
from tasks.retraining import (
    RECIPE,
    Registry,
    Retraining,
    RetrainingRecipe,
    RetrainingState,
    RetrainingStates,
    write_recipe,
)
from tasks.retraining.affordable_epsilon import epsilon_for
from tasks.retraining.year import Year, year_ahead
from tasks.runs import store
from tasks.runs.dvc_stages import STAGES, Say, StageFailedError, StageRefusedError, checkout_lock
from tasks.runs.ledger import declare, missing_blocks, open_ledger, open_runs
from tasks.runs.metrics import describe_metric, headline_metric
from tasks.runs.metrics_document import is_private
from tasks.runs.reservations import what_was_spent
from tasks.runs.stage_main import refusals, shortage
from tasks.runs.summary import claimed_cost
from tasks.tracking.runs import log_promotion

_COMPARED = "privacy.evaluation.compare_with"


class TooFewBlocksError(RefusedError):
    """No retraining is due: too few blocks can pay for one, or none of them is new."""


@dataclass(frozen=True)
class NextRetraining:
    """The next retraining: its blocks, its epsilon, and the change to params.yaml.

    year: of comparisons with the model in use, where held-out people are private; else None.
    """

    blocks: tuple[str, ...]
    epsilon: float
    edit: ParamsEdit
    year: Year | None = None


def readable_blocks(
    card: DataCard, ledger: Ledger, root: Path, plan: Callable[[], Plan]
) -> list[BlockBalance]:
    """The ledger's state of the blocks of a data set that can be read now; a new population is declared.

    A new block is declared by the first run that reads it, unless it holds what another does. plan: see
    `declare`. Raises DataRefusedError if the source cannot be read, RefusedError if the population is of another kind.
    """
    names_here = block_names(card, root=root, url=database_url(card.blocks))
    declare(ledger, dataset_info(card), plan=plan)
    return [block for block in ledger.blocks(card.population, names_here) if block.name in names_here]


def retire_exhausted_blocks(
    settings: Retraining, ledger: Ledger, card: DataCard, balances: list[BlockBalance]
) -> tuple[str, ...]:
    """Retire the blocks that were used and whose next payment would be too small to be useful; returns their names.

    If the database allows only the owner to retire, nothing is retired; such a block pays for no retraining anyway.
    """
    used = [block for block in balances if block.runs]
    names = exhausted_blocks(used, _smallest(settings, balances), settings.spread) if used else ()
    try:
        for name in names:
            ledger.retire_block(card.population, name)
    except NotAllowedError:
        return ()
    return names


def retrainings_left(settings: Retraining, balances: list[BlockBalance]) -> int:
    """How many more retrainings the caps of these blocks allow without new blocks; at most `warn_below`."""
    if not balances or not settings.warn_below:
        return 0
    coming = forecast(
        balances,
        settings.blocks,
        settings.spread,
        smallest=_smallest(settings, balances),
        horizon=settings.warn_below,
    )
    return len(coming.retrainings)


def decide_next(
    settings: Retraining,
    recipe: RetrainingRecipe,
    ledger: Ledger,
    *,
    root: Path,
    registry: Registry,
    last: tuple[str, ...] | None,
) -> NextRetraining:
    """Decide the retraining of a period that is due; nothing is charged.

    Args:
        settings: Of retrain.yaml.
        recipe: What is trained.
        ledger: That the checkout charges.
        root: The checkout.
        registry: Of the models, of which one may be in use.
        last: The blocks of the last retraining; None before the first.

    Raises:
        TooFewBlocksError: If nothing is due. Also what `params_edit`, `declare` and `plan_for` raise.
    """
    changes = recipe.settings(settings.dataset, settings.delta)

    def plan_of_recipe() -> Plan:
        alone = params_edit(root, ParamOverrides(settings=deepcopy(changes))).params
        return plan_for(alone, info_of(card, alone.data))

    card = data_card(settings.dataset, root / "data" / "cards")
    balances = readable_blocks(card, ledger, root, plan_of_recipe)
    if retire_exhausted_blocks(settings, ledger, card, balances):
        balances = readable_blocks(card, ledger, root, plan_of_recipe)
    used, price = _paying_blocks(settings, balances, last)
    # The older blocks are declared here, before the run declares those that it reads, so that they keep their order.
    older = tuple(block.name for block in takewhile(lambda block: block.name not in used, balances))
    if older:
        declare(ledger, replace(dataset_info(card), blocks=older), plan=plan_of_recipe)
    changes["data.blocks"] = list(used)
    if registry.serving is not None:
        model = registry.serving / "model.safetensors"
        if settings.warm_start:
            changes["model.start"] = str(model.relative_to(root))
        if card.holdout == "private":
            data = params_edit(root, ParamOverrides(settings=deepcopy(changes))).params.data
            if _is_comparable(model, info_of(card, data), root):
                changes[_COMPARED] = str(model.relative_to(root))
    # The plan is a function of epsilon, which follows from the price that all blocks can pay.
    planned = params_edit(root, ParamOverrides(settings=deepcopy(changes))).params
    info, privacy = replace(info_of(card, planned.data), blocks=used), planned.privacy

    def plan(epsilon: float) -> Plan:
        return plan_for(planned.with_epsilon(epsilon), info)

    balance = ledger.balance(info.population, "all")
    epsilon, delta = epsilon_for(price, balance, len(used), privacy.delta, plan)
    changes |= {"privacy.epsilon": epsilon, "privacy.delta": delta}
    edit, evaluation = params_edit(root, ParamOverrides(settings=changes)), None
    if card.holdout == "private":
        evaluation = plan(epsilon).evaluation
    if evaluation is None:
        return NextRetraining(used, epsilon, edit)
    smallest, people = _smallest(settings, balances), held_out_people(card)
    ahead = year_ahead(settings, balances, balance, smallest=smallest, evaluation=evaluation, people=people)
    return NextRetraining(used, epsilon, edit, ahead)


def _paying_blocks(
    settings: Retraining, balances: list[BlockBalance], last: tuple[str, ...] | None
) -> tuple[tuple[str, ...], Price]:
    """The blocks of the next retraining and its price; raises TooFewBlocksError if none can pay, or none is new."""
    if not balances:
        raise TooFewBlocksError("there is no block yet, so nothing is trained.", code="too_few_blocks")
    try:
        used, price = next_retraining(
            settings.blocks, settings.spread, balances, smallest=_smallest(settings, balances)
        )
    except RefusedError as refusal:
        raise TooFewBlocksError(
            "{problem}", code="too_few_blocks", problem=PIPELINE.sentence(refusal)
        ) from None
    if last is not None and set(used) <= set(last):
        raise TooFewBlocksError(
            "none of the blocks that can pay is new, so the model that serves stays.", code="too_few_blocks"
        )
    return used, price


def _is_comparable(model: Path, info: DatasetInfo, root: Path) -> bool:
    """Whether the model in a file can be evaluated on a data set; not one of other data or code."""
    try:
        check_comparable(model, info)
        load_model(model, allow_code=named_code(root))
    except (ModelRefusedError, NotUsableError, RuntimeError):
        return False
    return True


def _smallest(settings: Retraining, balances: list[BlockBalance]) -> Price:
    return tuple(settings.smallest * min(parts) for parts in zip(*(b.limit for b in balances), strict=True))


OutcomeKind = Literal["promoted", "kept", "skipped", "done", "busy", "refused", "broken", "failed"]
RunStage = Callable[[str, Path], object]


@dataclass(frozen=True)
class Outcome:
    """How a delivery of a retraining ended, as a word and as a sentence.

    left: how many more retrainings the caps allow now, counted up to `warn_below`; None if nothing was spent.
    models: the new model and that in use before, each with its held-out metric; empty if no model was made.
    code, fields: of the refusal that ended it, if it has a code.
    """

    kind: OutcomeKind
    message: str
    left: int | None = None
    models: tuple[tuple[str, str], ...] = ()
    code: str = ""
    fields: Mapping[str, object] = field(default_factory=dict)

    def message_or_raise(self) -> str:
        """The sentence; raises StageRefusedError or StageFailedError for a delivery that was refused or failed."""
        if self.kind in ("refused", "broken"):
            raise StageRefusedError(self.message, self.code, self.fields)
        if self.kind == "failed":
            raise StageFailedError(self.message)
        return self.message


@dataclass(frozen=True)
class DeliveryWork:
    """A retraining in a checkout.

    run_stage: runs a stage there; raises StageRefusedError or StageFailedError. file: where the settings are from.
    accepts_recipe: whether the recipe may differ from that of the model in use.
    """

    settings: Retraining
    root: Path
    run_stage: RunStage
    say: Say
    file: Path | None = None
    accepts_recipe: bool = False

    @property
    def registry(self) -> Registry:
        """The registry of its models."""
        return Registry(self.root / "models" / self.settings.name)

    @property
    def states(self) -> RetrainingStates:
        """The states of its periods."""
        return RetrainingStates(home() / "retrainings" / self.settings.name)

    @property
    def ledger(self) -> Ledger:
        """The ledger that the checkout charges."""
        return open_ledger(self.root)

    @property
    def command(self) -> str:
        """What a person types to do it by hand."""
        if self.file is None or self.file == self.root / "retrain.yaml":
            return "epsilonflow retrain"
        return f"epsilonflow retrain {shlex.quote(os.path.relpath(self.file, self.root))}"

    def key(self, period: str) -> str:
        """The name and period under which the ledger charges once."""
        return f"{self.settings.name} {period}"


def deliver(work: DeliveryWork) -> Outcome:
    """Do `retrain` now, in the locked checkout."""
    with checkout_lock(work.root, say=work.say):
        return retrain(work, now=datetime.now(UTC))


def retrain(work: DeliveryWork, *, now: datetime) -> Outcome:
    """Resume an interrupted retraining, then run the one that is due at time `now`; see the module."""
    before = store.begun_runs(home(), work.root)  # so that a refusal can say what this delivery has spent
    try:
        with PIPELINE.wording_errors(), work.states.try_lock() as free:
            if not free:
                return Outcome(
                    "busy", f"another process is at the retraining {work.settings.name}; it does the work."
                )
            return _run_due(work, work.settings.period(now))
    except LedgerBrokenError as broken:
        return Outcome("broken", str(broken))
    except refusals() as refusal:
        message = f"{str(refusal).rstrip('.')}. {what_was_spent(before, work.root)}"
        code, fields = getattr(refusal, "code", ""), getattr(refusal, "fields", {})
        return Outcome("refused", message, code=code, fields=fields)
    except (OSError, MemoryError) as error:
        words = shortage(error)
        if words is None:
            raise
        return Outcome("failed", words)


def _run_due(work: DeliveryWork, period: str) -> Outcome:
    interrupted = work.states.open()
    if interrupted is not None:
        ledger = work.ledger
        run_id = charged_run(work, interrupted.period, ledger)
        # Given up by a person since: the ledger knows, and this home does not yet.
        if run_id is not None and ledger.status(run_id) == "forfeited":
            work.say(give_up(work, interrupted))
        else:
            work.say(f"the retraining of {interrupted.period} was interrupted: it is resumed first")
            outcome = _run_stages(work, interrupted)
            if interrupted.period == period or outcome.kind in ("refused", "failed"):
                return outcome
    done = work.states.of(period)
    if done is not None:
        return Outcome("done", f"the retraining of {period} is done, nothing was spent again: {done.message}")
    return _begin_period(work, period)


def _begin_period(work: DeliveryWork, period: str) -> Outcome:
    ledger, before = work.ledger, work.states.all()
    # This home has no state of the period, but the ledger may have a charge for it.
    run_id = charged_run(work, period, ledger)
    if run_id is not None:
        status = ledger.status(run_id)
        words = f"the retraining of {period} is charged already, for run {run_id} of another home, which is {status}"
        return Outcome("busy" if status == "open" else "done", f"{words}; nothing was spent here.")
    if missing := _missing_here(work, ledger):
        work.say(missing)
    try:
        chosen = decide_next(
            work.settings,
            _recipe_of(work, before),
            ledger,
            root=work.root,
            registry=work.registry,
            last=before[-1].blocks if before else None,
        )
    except TooFewBlocksError as few:
        return Outcome(
            "skipped",
            f"no retraining in {period}: {few}{_held_by_open_runs(work)} Nothing was spent. The next scheduled"
            " retraining reads new blocks by itself; for one at once, start the same again when they are there.",
        )
    changes = recipe_changes(work, before, chosen.edit.after)
    if changes and not work.accepts_recipe:
        return Outcome(
            "refused",
            f"the recipe is not that of the model that serves: {changes}. Nothing was spent; accept it with"
            f" `{work.command} --accept-recipe`, in Prefect accept_recipe: true, or change it back.",
        )
    if changes:
        work.say(f"the recipe has changed, as was accepted: {changes}")
    state = RetrainingState(
        changes=changes,
        period=period,
        root=str(work.root.resolve()),
        params=chosen.edit.after,
        before=chosen.edit.before,
        blocks=chosen.blocks,
        epsilon=chosen.epsilon,
        number=before[-1].number + 1 if before else 1,
    )
    work.states.write(state)  # before anything is charged: a run that is killed is resumed by it
    work.say(f"retraining of {period} on {len(chosen.blocks)} blocks with epsilon {chosen.epsilon:g}")
    if chosen.year is not None:
        work.say(str(chosen.year))
    return _run_stages(work, state)


def _held_by_open_runs(work: DeliveryWork) -> str:
    """A sentence about runs whose reservations leave less of the blocks, after a blank; "" without one."""
    population = data_card(work.settings.dataset, work.root / "data" / "cards").population
    names = open_runs(work.ledger.history(population))
    if not names:
        return ""
    return (
        f" What is reserved for runs that have not ended ({', '.join(names)}) is missing there; `epsilonflow doctor`"
        " says how to resume those that were stopped."
    )


def _missing_here(work: DeliveryWork, ledger: Ledger) -> str | None:
    """The sentence about charged blocks that cannot be read now; None without one."""
    card = data_card(work.settings.dataset, work.root / "data" / "cards")
    if ledger.find_terms(card.population) is None:
        return None
    names = block_names(card, root=work.root, url=database_url(card.blocks))
    return missing_blocks(ledger, card.population, names)


def _recipe_of(work: DeliveryWork, before: list[RetrainingState]) -> RetrainingRecipe:
    """The recipe of the settings; if they have none, it is taken over once, and written into their file."""
    if work.settings.recipe is not None:
        return work.settings.recipe
    params_text = (work.root / "params.yaml").read_text(encoding="utf-8")
    settings = params.parse(load_yaml(params_text), reads=("data",))
    if not before and settings.data.dataset != work.settings.dataset:
        raise ParamsRefusedError(
            "params.yaml is about {dataset!r} and the retraining about {retrained!r}; write what is to be"
            " trained under `recipe` in its file: the groups algorithm, model and privacy of params.yaml.",
            code="bad_keys",
            dataset=settings.data.dataset,
            retrained=work.settings.dataset,
            keys=("recipe",),
        )
    recipe = RetrainingRecipe.of(before[-1].params if before else params_text)
    if str(recipe.model.get("start")).startswith(f"models/{work.settings.name}/"):
        recipe.model["start"] = None
    if isinstance(evaluation := recipe.privacy.get("evaluation"), dict):
        evaluation.pop("compare_with", None)  # decided for each retraining
    if work.file is not None:
        write_recipe(work.file, recipe)
        work.say(
            f"{work.file.name} had no recipe; that of {'the last retraining' if before else 'params.yaml'} is in it"
        )
    return recipe


def recipe_changes(work: DeliveryWork, before: list[RetrainingState], after: str) -> str:
    """How the recipe in the text of params.yaml differs from that of the model in use; "" if it does not.

    A recipe that the last retraining had was accepted then, even if its model did not get into use.
    """
    serving = work.registry.serving
    earlier = [state for state in before if serving is not None and state.run_id == serving.name]
    values = _recipe_values(after)
    if not earlier or values in [_recipe_values(state.params) for state in (*earlier, before[-1])]:
        return ""
    old = _recipe_values(earlier[-1].params)
    keys = sorted(key for key in old.keys() | values.keys() if old.get(key) != values.get(key))
    return "; ".join(f"{key} is {values.get(key)} and was {old.get(key)}" for key in keys)


def _recipe_values(text: str) -> dict[str, object]:
    """The values of a recipe by dotted key, with defaults, without what is decided for each retraining."""
    parsed = params.parse(load_yaml(text), reads=RECIPE)
    groups = {name: getattr(parsed, name) for name in ("data", "privacy", "model")}
    documents = {name: group.model_dump() for name, group in groups.items()}
    documents |= {"algorithm": parsed.algorithm_settings, "features": parsed.features_settings or {}}
    documents["privacy"]["evaluation"] = parsed.privacy.evaluation.model_dump()
    decided = ("data.blocks", "privacy.epsilon", "model.start", _COMPARED)
    return {key: value for key, value in _by_dotted_key(documents) if key not in decided}


def _by_dotted_key(document: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in document.items():
        if isinstance(value, Mapping) and value:
            yield from _by_dotted_key(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _run_stages(work: DeliveryWork, state: RetrainingState) -> Outcome:
    """Run the stages of an open retraining and end it; after a fault it stays open for the next delivery."""
    root = str(work.root.resolve())
    if state.root != root and Path(state.root).is_dir():
        return Outcome(
            "refused",
            f"the retraining of {state.period} was begun in {state.root}; finish it there. Nothing was spent here.",
        )
    # A person may have edited params.yaml since the retraining began: what is put back is what is there now.
    before = (work.root / "params.yaml").read_text(encoding="utf-8")
    if before == state.params and state.root == root:
        before = state.before  # it was killed before it could put them back
    if (state.root, state.before) != (root, before):
        state = replace(state, root=root, before=before)
        work.states.write(state)
    override_params(work.root, state.before, state.params)
    try:
        with retraining_for(work.key(state.period)):
            for stage in STAGES:
                work.run_stage(stage, work.root)
                # Before the charge, so that nothing is paid for that was not asked for.
                if stage == "calibrate":
                    check_params(work.root, state.params)
        return _finish_delivery(work, state)
    except (StageRefusedError, ParamsRefusedError) as refusal:
        ended = _end_after_fault(work, state, "refused", str(refusal))
        return replace(ended, code=refusal.code, fields=refusal.fields)
    except StageFailedError as failure:
        return _end_after_fault(work, state, "failed", str(failure))
    finally:
        restore_params(work.root)  # also if the run goes on later: its params are in its state


def _end_after_fault(
    work: DeliveryWork, state: RetrainingState, kind: Literal["refused", "failed"], reason: str
) -> Outcome:
    """End a delivery after a fault. Without a charge the period can start again; a charged run is resumed next time."""
    ledger, reason = work.ledger, f"{reason.rstrip('.')}."
    run_id = charged_run(work, state.period, ledger)
    if run_id is None:
        work.states.forget(state)
        return Outcome(kind, f"{reason} Nothing was spent; the model that serves stays.")
    status = ledger.status(run_id)
    if status == "forfeited" or (status == "open" and not store.is_here(home(), run_id)):
        return Outcome(kind, f"{reason} {give_up(work, state)}")
    return Outcome(
        kind,
        f"{reason} Run {run_id} is charged; the next delivery resumes it at no extra cost, and"
        f" `{work.command} --give-up` ends it.",
    )


def give_up(work: DeliveryWork, state: RetrainingState) -> str:
    """End an open retraining without a model; returns the sentence.

    Its reservation is forfeited and counts as spent. A reservation of another home stays, since its run may be running.
    """
    ledger = work.ledger
    run_id = charged_run(work, state.period, ledger)
    status = None if run_id is None else ledger.status(run_id)
    # It may be forfeited already, by a person or if the process was killed right after; a settled run lost its model.
    is_lost = status == "forfeited" or (status == "open" and store.is_here(home(), str(run_id)))
    if run_id is not None and is_lost:
        ledger.forfeit(run_id)
        store.abandon(home(), run_id)
    if status != "settled":
        restore_params(work.root)
    words = f"The retraining of {state.period} is given up" + (
        f", and the whole reservation of run {run_id} counts as spent." if is_lost else "."
    )
    kind: Literal["forfeited", "given up"] = "forfeited" if is_lost else "given up"
    work.states.write(replace(state, kind=kind, message=words, run_id=run_id))
    return words


def charged_run(work: DeliveryWork, period: str, ledger: Ledger) -> str | None:
    """The run that was charged in a ledger for a period; None if there is none."""
    population = data_card(work.settings.dataset, work.root / "data" / "cards").population
    return ledger.run_of(population, work.key(period))


def _finish_delivery(work: DeliveryWork, state: RetrainingState) -> Outcome:
    # The state is written last. A process that is killed before that does all of this again, and a model that is
    # registered, or in use, is registered and in use once more.
    registry, artifacts = work.registry, work.root / "artifacts"
    entry, serving = registry.add(artifacts), registry.serving
    promotes, words, models = _decide_promotion(work, entry, serving)
    cost = claimed_cost(registry.metrics(entry.name), Receipt.read(entry / "receipt.json"))
    words += " The new model is not private." if cost is None else f" The new model cost epsilon {cost}."
    words += f" The recipe has changed: {state.changes}." if state.changes else ""
    if promotes:
        registry.promote(entry)
        settings = params.load(work.root / "params.yaml", reads=("tracking",))
        log_promotion(work.settings.name, entry, settings.tracking, root=work.root)
    card = data_card(work.settings.dataset, work.root / "data" / "cards")
    ledger = work.ledger
    balances = readable_blocks(card, ledger, work.root, lambda: planned_run(work.root, card))
    retired = retire_exhausted_blocks(work.settings, ledger, card, balances)
    words += f" Retired: {', '.join(retired)}." if retired else ""
    kind: Literal["promoted", "kept"] = "promoted" if promotes else "kept"
    work.states.write(replace(state, kind=kind, message=words, run_id=entry.name))
    left = retrainings_left(work.settings, ledger.blocks(card.population))
    return Outcome(kind, f"{state.period}: {words}", left, models)


PromotionDecision: TypeAlias = tuple[bool, str, tuple[tuple[str, str], ...]]
"""Whether to promote the new model, why, and the models compared."""


def _decide_by_release(work: DeliveryWork, entry: Path, serving: Path | None) -> PromotionDecision:
    """The same where held-out people are private: by what was released of the difference of both models on them.

    The release is that of the new model's run, so nothing more is spent. A gain counts only where it is above the noise
    and the chance of who was held out, so that no model is promoted by noise.
    """
    fresh = work.registry.metrics(entry.name)
    candidate = f"new: {entry.name}", describe_metric(fresh)
    if serving is None or serving == entry:
        words = f"the model {entry.name} serves, with private held-out {describe_metric(fresh)}."
        return True, words, (candidate,)
    compared_with = read_json(entry / "plan.json").get("held_out", {}).get("compare_with")
    if compared_with != store.sha256_of(serving / "model.safetensors"):
        words = f"the model {serving.name} stays: the new one was not compared with it."
        return False, words, (candidate,)
    models = (
        candidate,
        (f"in use before: {serving.name}", describe_metric(work.registry.metrics(serving.name))),
    )
    gain = fresh.get("test_difference") if is_private(fresh) else None
    if gain is None:
        return False, f"the model {serving.name} stays: noise drowns the difference of the two.", models
    certain = (
        f"{describe_metric(fresh)}, a gain in the mean score of {gain['value']:.3g} on the same private people"
        f" ({gain['low']:.3g} to {gain['high']:.3g} with noise and chance)"
    )
    if gain["low"] >= work.settings.minimal_gain:
        return True, f"the model {entry.name} serves in place of {serving.name}: {certain}.", models
    return False, f"the model {serving.name} stays; the new one has {certain}.", models


def _decide_promotion(work: DeliveryWork, entry: Path, serving: Path | None) -> PromotionDecision:
    """Whether to promote the new model, why, and the models compared on the held-out records of its own blocks."""
    if DatasetInfo.read(work.root / "datasets/prepared").holdout == "private":
        return _decide_by_release(work, entry, serving)
    prepared, allowed = work.root / "datasets" / "prepared", named_code(work.root)
    fresh = metrics_of(entry / "model.safetensors", prepared, allow_code=allowed)
    candidate = f"new: {entry.name}", describe_metric(fresh)
    if serving is None or serving == entry:
        return True, f"the model {entry.name} serves, with held-out {describe_metric(fresh)}.", (candidate,)
    try:
        old = metrics_of(serving / "model.safetensors", prepared, allow_code=allowed)
    except (ModelRefusedError, NotUsableError, RuntimeError):
        return (
            False,
            f"the model {serving.name} is of other data or code, so they cannot be compared; it stays.",
            (candidate, (f"in use before: {serving.name}", "of other data or code")),
        )
    scores = f"held-out {describe_metric(fresh)}, against {describe_metric(old)} of {serving.name}"
    models = candidate, (f"in use before: {serving.name}", describe_metric(old))
    if headline_metric(fresh) >= headline_metric(old) + work.settings.minimal_gain:
        return True, f"the model {entry.name} serves: {scores}.", models
    return False, f"the model {serving.name} stays; the new one has {scores}.", models

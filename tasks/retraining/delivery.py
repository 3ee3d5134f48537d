"""A scheduled retraining: decide, run the five stages, compare with the model in use, promote or keep.

There is one retraining per period, however often it is delivered: this home records it, and the ledger charges a period
once. A retraining that was interrupted or ended by a fault is resumed first, unchanged, with the same noise and at no
extra cost, however long the fault lasts. Its reservation is forfeited only if a person gives it up, since the charge is
spent either way. Only runs of this home are forfeited, since a run of another home may still be running.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Literal

from algorithms.errors import LedgerBrokenError
from algorithms.models import ModelRefusedError
from algorithms.privacy.ledger import Ledger
from data.card import data_card
from data.files import write_text
from tasks.config import params
from tasks.config.environment import home, retraining_for
from tasks.evaluate import metrics_of
from tasks.retraining.choice import TooFewBlocksError, blocks_here, how_many_left, next_of, retire
from tasks.retraining.registry import Registry, State, States
from tasks.retraining.settings import Retraining
from tasks.runs import store
from tasks.runs.ledger import open_ledger
from tasks.runs.quality import quality, worded
from tasks.runs.stages import STAGES, Say, StageFailedError, StageRefusedError, disk_full, refusals
from tasks.tracking.runs import log_promotion

Kind = Literal["promoted", "kept", "skipped", "done", "busy", "refused", "broken", "failed"]
RunStage = Callable[[str, Path], object]


@dataclass(frozen=True)
class Outcome:
    """How a delivery of a retraining ended, as a word and as a sentence.

    left: how many more retrainings the caps allow now, counted up to `warn_below`; None if nothing was spent.
    """

    kind: Kind
    message: str
    left: int | None = None


@dataclass(frozen=True)
class Work:
    """A retraining in a checkout. run_stage: runs a stage there; raises StageRefusedError or StageFailedError."""

    settings: Retraining
    root: Path
    run_stage: RunStage
    say: Say

    @property
    def registry(self) -> Registry:
        """The registry of its models."""
        return Registry(self.root / "models" / self.settings.name)

    @property
    def states(self) -> States:
        """The states of its periods."""
        return States(home() / "retrainings" / self.settings.name)

    @property
    def ledger(self) -> Ledger:
        """The ledger that the checkout charges."""
        return open_ledger(self.root)

    def key(self, period: str) -> str:
        """The name and period under which the ledger charges once."""
        return f"{self.settings.name} {period}"


def retrain(work: Work, *, now: datetime) -> Outcome:
    """Resume an interrupted retraining, then run the one that is due at time `now`; see the module."""
    try:
        with work.states.held() as free:
            if not free:
                return Outcome(
                    "busy", f"another process is at the retraining {work.settings.name}; it does the work."
                )
            return _due(work, work.settings.period(now))
    except LedgerBrokenError as broken:
        return Outcome("broken", str(broken))
    except refusals() as refusal:
        return Outcome("refused", str(refusal))
    except OSError as error:
        words = disk_full(error)
        if words is None:
            raise
        return Outcome("failed", words)


def _due(work: Work, period: str) -> Outcome:
    interrupted = work.states.open()
    if interrupted is not None:
        run_id = charged_run(work, interrupted.period)
        if run_id is not None and work.ledger.status(run_id) == "forfeited":
            work.say(give_up(work, interrupted))
        else:
            work.say(f"the retraining of {interrupted.period} was interrupted: it is resumed first")
            outcome = _run(work, interrupted)
            if interrupted.period == period or outcome.kind in ("refused", "failed"):
                return outcome
    done = work.states.of(period)
    if done is not None:
        return Outcome("done", f"the retraining of {period} is done, nothing was spent again: {done.message}")
    return _begin(work, period)


def _begin(work: Work, period: str) -> Outcome:
    run_id, before = charged_run(work, period), work.states.all()
    if run_id is not None:
        status = work.ledger.status(run_id)
        words = f"the retraining of {period} is charged already, for run {run_id} of another home, which is {status}"
        return Outcome("busy" if status == "open" else "done", f"{words}; nothing was spent here.")
    try:
        chosen = next_of(
            work.settings,
            work.ledger,
            root=work.root,
            registry=work.registry,
            last=before[-1].blocks if before else None,
        )
    except TooFewBlocksError as few:
        return Outcome("skipped", f"no retraining in {period}: {few}")
    state = State(
        period=period,
        root=str(work.root.resolve()),
        params=chosen.revision.after,
        before=chosen.revision.before,
        blocks=chosen.blocks,
        epsilon=chosen.epsilon,
        number=before[-1].number + 1 if before else 1,
    )
    work.states.write(state)
    work.say(f"retraining of {period} on {len(chosen.blocks)} blocks with epsilon {chosen.epsilon:g}")
    return _run(work, state)


def _run(work: Work, state: State) -> Outcome:
    """Run the stages of an open retraining and end it; after a fault it stays open for the next delivery."""
    here = str(work.root.resolve())
    if state.root != here:
        if Path(state.root).is_dir():
            return Outcome(
                "refused", f"the retraining of {state.period} was begun in {state.root}; finish it there."
            )
        before = (work.root / "params.yaml").read_text(encoding="utf-8")
        state = replace(state, root=here, before=before)
        work.states.write(state)
    write_text(work.root / "params.yaml", state.params)
    try:
        with retraining_for(work.key(state.period)):
            for stage in STAGES:
                work.run_stage(stage, work.root)
    except StageRefusedError as refusal:
        return _stopped(work, state, "refused", str(refusal))
    except StageFailedError as failure:
        return _stopped(work, state, "failed", str(failure))
    return _finished(work, state)


def _stopped(work: Work, state: State, kind: Literal["refused", "failed"], reason: str) -> Outcome:
    """End a delivery after a fault. Without a charge the period can start again; a charged run is resumed next time."""
    run_id = charged_run(work, state.period)
    if run_id is None:
        _put_back(work, state)
        work.states.forget(state)
        return Outcome(kind, f"{reason} Nothing was spent; the model that serves stays.")
    status = work.ledger.status(run_id)
    if status == "forfeited" or (status == "open" and not store.is_here(home(), run_id)):
        return Outcome(kind, f"{reason} {give_up(work, state)}")
    return Outcome(
        kind,
        f"{reason} Run {run_id} is charged, and goes on where it was at the next delivery for nothing more, or ends by"
        " `epsilonflow retrain --give-up`.",
    )


def _put_back(work: Work, state: State) -> None:
    """Restore params.yaml from before the retraining, unless somebody has changed it since."""
    path = work.root / "params.yaml"
    if path.read_text(encoding="utf-8") == state.params:
        write_text(path, state.before)


def give_up(work: Work, state: State) -> str:
    """End an open retraining without a model; returns the sentence.

    Its reservation is forfeited and counts as spent. A reservation of another home stays, since its run may be running.
    """
    ledger = work.ledger
    run_id = charged_run(work, state.period)
    status = None if run_id is None else ledger.status(run_id)
    # It may be forfeited already, by a person or if the process was killed right after; a settled run lost its model.
    is_lost = status == "forfeited" or (status == "open" and store.is_here(home(), str(run_id)))
    if run_id is not None and is_lost:
        ledger.forfeit(run_id)
        store.abandon(home(), run_id)
    if status != "settled":
        _put_back(work, state)
    words = f"The retraining of {state.period} is given up" + (
        f", and the whole reservation of run {run_id} counts as spent." if is_lost else "."
    )
    kind: Literal["forfeited", "given up"] = "forfeited" if is_lost else "given up"
    work.states.write(replace(state, kind=kind, message=words, run_id=run_id))
    return words


def charged_run(work: Work, period: str) -> str | None:
    """The run that was charged for a period; None if there is none."""
    population = data_card(work.settings.dataset, work.root / "data" / "cards").population
    return work.ledger.run_of(population, work.key(period))


def _finished(work: Work, state: State) -> Outcome:
    registry, artifacts = work.registry, work.root / "artifacts"
    entry, serving = registry.add(artifacts), registry.serving
    promotes, words = _compared(work, entry, serving)
    if promotes:
        registry.promote(entry)
        settings = params.load(work.root / "params.yaml", reads=("tracking",))
        log_promotion(work.settings.name, entry, settings.tracking, root=work.root)
    card, standing = blocks_here(work.settings, work.ledger, work.root)
    retired = retire(work.settings, work.ledger, card, standing)
    words += f" Retired: {', '.join(retired)}." if retired else ""
    kind: Literal["promoted", "kept"] = "promoted" if promotes else "kept"
    work.states.write(replace(state, kind=kind, message=words, run_id=entry.name))
    left = how_many_left(work.settings, work.ledger.blocks(card.population))
    return Outcome(kind, f"{state.period}: {words}", left)


def _compared(work: Work, entry: Path, serving: Path | None) -> tuple[bool, str]:
    """Whether to promote the new model, and why, judged on the held-out records of its own blocks."""
    prepared = work.root / "datasets" / "prepared"
    fresh = metrics_of(entry / "model.safetensors", prepared)
    if serving is None or serving == entry:
        return True, f"the model {entry.name} serves, with held-out {worded(fresh)}."
    try:
        old = metrics_of(serving / "model.safetensors", prepared)
    except (ModelRefusedError, RuntimeError):
        return False, f"the model {serving.name} is of other data, so they cannot be compared; it stays."
    compared = f"held-out {worded(fresh)}, against {worded(old)} of {serving.name}"
    if quality(fresh) >= quality(old) + work.settings.minimal_gain:
        return True, f"the model {entry.name} serves: {compared}."
    return False, f"the model {serving.name} stays; the new one has {compared}."

"""The train stage, which alone spends: see `train` for the order of its steps.

What it leaves is, each durable before the next: the run's folder with the secret key of its noise; the reservation;
checkpoints; the release of private held-out records; settlement; the result. A process that is killed at any point
finds its folder when it is started again and resumes with the same noise, so it publishes the same model and spends
nothing more. An identical run that is already done returns the result at no cost.
"""

import hashlib
import json
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import partial
from pathlib import Path
from typing import Any

import torch

from algorithms import models
from algorithms.core.checkpoint import CHECKPOINT
from algorithms.core.plan import Plan
from algorithms.core.private_evaluation import release_evaluation
from algorithms.core.training import Hooks, OnStep, ResumableRun
from algorithms.core.training import train as run_training
from algorithms.errors import RefusedError
from algorithms.evaluation import recalibration_of
from algorithms.gradients import ProcessLostError
from algorithms.models import Model
from algorithms.models.saved import load_model, set_temperature
from algorithms.privacy.accounting import EventRow
from algorithms.privacy.accounting.epsilon import ADD_OR_REMOVE_ONE
from algorithms.privacy.accounting.events import Schedule, run_lengths, schedule_to_json
from algorithms.privacy.barrier.barrier import ComputeConfig
from algorithms.privacy.barrier.device import device_of
from algorithms.privacy.barrier.process_group import SINGLE_PROCESS, ProcessGroup
from algorithms.privacy.barrier.trace import Diagnostics, Trace
from algorithms.privacy.documents import PlanDocument, Receipt, RunIdentity
from algorithms.privacy.ledger import WHOLE_POPULATION, Ledger
from algorithms.privacy.mechanisms.noise import Generator
from data import DatasetInfo
from data.prepared import changed_records_error, digest_of, halves_of, load_as, load_held_out
from data.readers.records import RecordBatch
from tasks.calibrate import check_plan, plan_in
from tasks.config import home, ledger_url, params, retraining
from tasks.config.own_code import named_code
from tasks.config.params import Params
from tasks.evaluation_counts import LoadedModel, count_held_out
from tasks.model_building import features_for, model_for
from tasks.model_file import check_comparable, save_model, shrinkage_of
from tasks.preflight import consent, rehearsal, sanity
from tasks.runs import store
from tasks.runs.charge import ChargedRun, claim_run
from tasks.runs.dvc_stages import EXISTING_RESULT, TRAINING_LINE
from tasks.runs.ledger import bind, holdout_note, open_newest, register
from tasks.runs.processes import broadcast_sealed, join_processes
from tasks.runs.software import pipeline_software, reuse_note
from tasks.runs.stage_main import main_of
from tasks.runs.store import EVALUATION, PLAN, RECEIPT, data_facts
from tasks.tracking import group_of
from tasks.tracking.live import live_curve, progress

READS = ("privacy", "features", "algorithm", "model", "performance", "tracking", "ledger")
_ARTIFACTS = ("model.safetensors", "trace.parquet", "diagnostics.parquet", EVALUATION, "receipt.json")
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """The work of the stage.

    Attributes:
        settings: Its parameters.
        plan_file: The bytes of the plan that calibration wrote.
        prepared: The folder of the prepared data.
        info: The description of these data.
        blocks: The population's blocks that are in the prepared data.
        retraining: The scheduled retraining that the run is charged for, which the ledger charges only once; None for a
            run that a person requested.
        group: The processes that train together.
    """

    settings: Params
    plan_file: bytes
    prepared: Path
    info: DatasetInfo
    blocks: tuple[str, ...] = (WHOLE_POPULATION,)
    retraining: str | None = None
    group: ProcessGroup = SINGLE_PROCESS

    @property
    def document(self) -> PlanDocument:
        """The plan's document."""
        return PlanDocument.from_json(self.plan_file, PLAN)

    @property
    def plan(self) -> Plan:
        """The plan that calibration wrote."""
        return Plan.from_document(self.document)

    def digest(self, home: Path) -> str:
        """A digest of everything that decides the result; see `store.digest`."""
        return store.training_digest(
            json.loads(self.plan_file),
            self.settings.model,
            self.blocks,
            self.info,
            self.prepared,
            home=home,
        )


class EarlierSettlement(Enum):
    """How the ledger has settled a run that was killed before its result was stored, and now does the same again."""

    NONE = auto()
    WITH_EVALUATION = auto()
    WITHOUT_EVALUATION = auto()

    @staticmethod
    def of(settled: list[EventRow] | None, with_evaluation: Schedule) -> "EarlierSettlement":
        """settled: the events of the settlement, if there is one. with_evaluation: what they are if it evaluated."""
        if settled is None:
            return EarlierSettlement.NONE
        evaluated = settled == schedule_to_json(with_evaluation)
        return EarlierSettlement.WITH_EVALUATION if evaluated else EarlierSettlement.WITHOUT_EVALUATION


def train(job: Job, *, ledger: Ledger, home: Path, root: Path, artifacts: Path) -> None:
    """Train as planned and write the model, the noise trace, the diagnostics and the receipt into `artifacts`.

    In this order: find the device, build the model, check the plan, claim the run, inspect the model, reserve, train,
    evaluate, settle, hand out. The table of diagnostics is empty if none were requested; after a crash it lacks the
    steps before.

    home: folder of the run folders. root: the checkout. Raises BudgetRefusedError if the population cannot pay. Raises
    RefusedError or ModelRefusedError if the plan, the model or a checkpoint does not fit, or if nobody agrees to spend
    again or to train with settings that look wrong. Nothing is spent then.
    """
    device_of(job.settings.performance.device)  # refuses one that this machine has not
    model = model_for(job.settings, job.info)
    check_plan(job.document, job.settings, job.info)  # of the same files that the model was read from
    _comparison_model(job, root)  # refuses one that has changed since it was planned
    with claim_run(
        job.digest(home),
        ledger,
        job.info,
        noise=job.settings.privacy.noise,
        seed=job.settings.model.seed,
        confirm_repeat=lambda run_id, has_result: _confirm_repeat(job, run_id, has_result, ledger),
        home=home,
        root=root,
    ) as (run, software):
        _log_claim(run, job.info)
        charged_run = ChargedRun(ledger, run, software, job.info, job.prepared, job.blocks, home, root)
        with run.abandon_if_refused(ledger.status):
            if run.result is None and run.ledger_status is None:
                _check_settings(job, cards=root / "data" / "cards")
            register(ledger, job.info, home=home, prepared=job.prepared, plan=lambda: job.plan)
            result = run.result or _train_and_settle(job, model, charged_run)
        run.forget_secrets()  # also of a result that a killed process stored, and could not clean up behind
        store.hand_out(result, artifacts, _ARTIFACTS, facts=data_facts(job.info))


def _log_claim(run: store.RunAttempt, info: DatasetInfo) -> None:
    """Say whether the run is trained or its result is handed out, which `flows` show."""
    if run.result is None:
        _LOG.info(TRAINING_LINE)
        return
    note = reuse_note(Receipt.read(run.result / RECEIPT), is_public=info.is_public)
    _LOG.info("%s: run %s is identical%s.", EXISTING_RESULT, run.run_id, f"; {note}" if note else "")


def _check_settings(job: Job, *, cards: Path) -> None:
    """Refuse settings that look wrong, unless a person agrees; for public records they are only logged."""
    warnings = sanity.sanity_warnings(job.settings, job.plan, sanity.records_of(job.info, cards))
    consent.confirm_or_refuse(warnings, job.info, epsilon=job.plan.target.budget.epsilon)


def _confirm_repeat(job: Job, run_id: str, has_result: bool, ledger: Ledger) -> bool:
    """Whether a person agrees to repeat a run on private records that is already charged, and to charge it again.

    Raises RefusedError if nobody agrees and the result is missing or belongs to another retraining.
    """
    rows = ledger.history(job.info.population) if job.retraining else []
    of_run = [json.loads(row.about) for row in rows if (row.kind, row.run_id) == ("reserve", run_id)]
    is_for = job.retraining is None or any(of.get("retraining") == job.retraining for of in of_run)
    return consent.confirm_repeat(
        f"run {run_id}",
        "training",
        job.plan.target.budget.epsilon,
        has_result=has_result and is_for,
        or_else="bring its result back by `dvc checkout`, or ",
    )


def _train_and_settle(job: Job, model: Model, charged_run: ChargedRun) -> Path:
    """Inspect the model, reserve, train, settle; returns the folder with the result.

    The loop reserves once it has inspected the model, right before it opens the records.
    """
    run = charged_run.run
    identity = charged_run.identity(
        job.document.algorithm,
        device_of(job.settings.performance.device),
        diagnostics=job.settings.privacy.diagnostics,
    )
    folder = run.make_result_folder()
    group = group_of(run.run_id, job.info.population, is_on_blocks=bool(job.info.blocks))
    with live_curve(
        run.run_id, job.document, job.settings.tracking, group=group, root=charged_run.root
    ) as live:
        trace = _train_into(
            folder, job, charged_run, model, live, lambda: _reserve(job, charged_run, identity)
        )
        (folder / PLAN).write_bytes(job.plan_file)
        plan, schedule = job.plan, run_lengths(trace.events())
        earlier = EarlierSettlement.of(charged_run.settled_events, plan.with_evaluation(schedule))
        is_evaluated = _evaluate_into(folder, job, trace, charged_run, earlier)
        trace.write(folder / "trace.parquet")
        # Settled in full even if it ended early, since when to end was then an adaptive choice.
        released = plan if is_evaluated else plan.without_evaluation()
        return charged_run.settle(released, identity, folder, released.with_evaluation(schedule))


def _evaluate_into(
    folder: Path, job: Job, trace: Trace, charged_run: ChargedRun, earlier: EarlierSettlement
) -> bool:
    """Release the evaluation of private held-out records by the released model in `folder`; returns whether it did.

    The run is charged and the model trained, so an error costs the metrics alone, and leaves nothing of a release. Its
    message is not shown, as it may hold a value of a record.

    A run that was settled before does the same again. Raises RefusedError if that cannot be done now.
    """
    planned, steps = job.plan.evaluation, len(trace.rows)
    if planned is None or earlier is EarlierSettlement.WITHOUT_EVALUATION:
        return False
    try:
        file = folder / "model.safetensors"
        trained = load_model(file, allow_code=named_code(charged_run.root))
        other = _comparison_model(job, charged_run.root)
        data = load_held_out(job.prepared)
        if data.info != job.info:
            raise changed_records_error(job.prepared)
        halves = halves_of(data, job.prepared) if planned.spec.halves else None
        _check_same_records(job, charged_run)  # after all is read or mapped, as in `load_as`
        cells = count_held_out(planned.spec, trained, data, other, halves)
        released = release_evaluation(
            planned,
            cells,
            generator=charged_run.run.generator(),
            trace=trace,
            step=job.plan.steps,
            composed=0.0 if job.plan.adjacency == ADD_OR_REMOVE_ONE.name else job.plan.cost.epsilon,
        )
        (folder / EVALUATION).write_text(released.to_json() + "\n", encoding="utf-8")
        if planned.spec.halves and (recalibration := recalibration_of(released)) is not None:
            set_temperature(file, recalibration.temperature)
    except Exception as error:
        if earlier is EarlierSettlement.WITH_EVALUATION:
            raise RefusedError(
                "run {run_id} is settled with its evaluation, and the held-out records could not be"
                " evaluated again ({error}); start it again.",
                code="evaluation_failed",
                run_id=charged_run.run.run_id,
                error=type(error).__name__,
            ) from None
        _LOG.warning(
            "The held-out records could not be evaluated (%s). The model is released without metrics, and costs the"
            " same.",
            type(error).__name__,
        )
        del trace.rows[steps:]  # where the file could not be written, nothing was released
        (folder / EVALUATION).unlink(missing_ok=True)
        return False
    return True


def _comparison_model(job: Job, root: Path) -> LoadedModel | None:
    """The model that the evaluation compares with, if any; raises RefusedError if it is another than the plan's."""
    path = job.settings.privacy.evaluation.compare_with
    if path is None:
        return None
    if models.digest(Path(path)) != (job.document.held_out or {}).get("compare_with"):
        raise RefusedError(
            "{path} has changed since it was planned to be compared with; calibrate again.",
            code="stale_plan",
            path=path,
            differing="scores to compare with",
        )
    check_comparable(Path(path), job.info)
    return load_model(Path(path), allow_code=named_code(root))


def _check_same_records(job: Job, charged_run: ChargedRun) -> None:
    """Raise DataRefusedError unless the prepared records are those of the run; its noise is for no others."""
    if charged_run.run.run_id.rpartition("-")[0] != job.digest(charged_run.home):
        raise changed_records_error(job.prepared)


def _reserve(job: Job, charged_run: ChargedRun, identity: RunIdentity) -> None:
    """Rehearse the card, then charge the ledger. identity: the known part of the receipt."""
    run = charged_run.run
    if run.ledger_status is None:
        rehearsal.rehearse(job.document, job.info, identity)
        run.keep_plan(job.plan_file)
    notes = job.document.ledger_notes | holdout_note(job.info)
    charged_run.reserve(job.plan, notes | ({"retraining": job.retraining} if job.retraining else {}))
    bind(charged_run.ledger, job.info, home=charged_run.home, prepared=job.prepared)
    # The records are mapped by now: files that were replaced before that, or since, have another digest.
    _check_same_records(job, charged_run)


def _train_into(
    folder: Path, job: Job, charged_run: ChargedRun, model: Model, live: OnStep, reserve: Callable[[], None]
) -> Trace:
    """Train and write the released model and the trace into `folder`."""
    performance, run = job.settings.performance, charged_run.run
    diagnostics = Diagnostics()
    if performance.threads is not None:
        torch.set_num_threads(performance.threads)
    if job.group.count > 1:
        file = run.folder / CHECKPOINT
        checkpoint = file.read_bytes() if file.exists() else None
        # One generator and one checkpoint for all, so that they agree on steps, samples and noise.
        broadcast_sealed(job.group, _Start(run.run_id, run.generator(), checkpoint))
        _check_same_job(job, charged_run.home)
    with progress(job.plan.steps) as shown:

        def on_step(step: int, epsilon: float, noise_std: float) -> None:
            shown(step, epsilon, noise_std)
            live(step, epsilon, noise_std)

        # Several processes might have different cards, and so passes of different sizes.
        bound = (
            sanity.records_of(job.info, charged_run.root / "data" / "cards") if job.group.count == 1 else None
        )
        state, trace, model = _trainer(job, model, bound)(
            run=ResumableRun(run.run_id, run.generator(), run.folder, performance.checkpoint_seconds),
            hooks=Hooks(
                on_step=on_step,
                diagnostics=diagnostics if job.settings.privacy.diagnostics else None,
                reserve=reserve,
            ),
        )
    released = job.settings.algorithm.released(state)
    save_model(
        folder / "model.safetensors",
        model,
        released,
        job.info,
        job.document.algorithm,
        prepared=job.prepared,
        shrinkage=shrinkage_of(state),
    )
    diagnostics.write(folder / "diagnostics.parquet")
    return trace


def _trainer(
    job: Job, model: Model, max_number: int | None = None
) -> Callable[..., tuple[Any, Trace, Model]]:
    """The training loop, given all that is the same in each process of a run.

    max_number: a public bound on the number of records.
    """

    def records() -> RecordBatch:
        data = load_as(job.prepared, job.info)
        # Of the arrays that are mapped: a copy that was interrupted has another file `contents` than arrays.
        if job.group.count > 1 and not job.group.agrees(digest_of(data.train_features, data.train_labels)):
            raise RefusedError(
                "the processes of this run have other training records, or the same in another order, so that some"
                " would count twice and others never; prepare them on one machine and copy datasets/prepared to all.",
                code="processes_differ",
                differing="records",
            )
        return RecordBatch(data.train_features, data.train_labels)

    return partial(
        run_training,
        job.settings.algorithm,
        job.plan,
        model,
        open_records=records,
        compute=replace(compute_config(job.settings.performance, job.group), max_number=max_number),
        features=features_for(job.settings, job.info),
    )


def compute_config(wanted: params.Performance, group: ProcessGroup = SINGLE_PROCESS) -> ComputeConfig:
    """The resources that params.yaml gives a training, for the loop and the barrier."""
    return ComputeConfig(
        device_of(wanted.device),
        wanted.memory_mb,
        wanted.physical_batch,
        workers=None if wanted.workers == "auto" else wanted.workers,
        threads=wanted.threads,
        group=group,
        shard_frozen=wanted.shard_frozen,
        shard_trained=wanted.shard_trained,
        offload=wanted.offload,
        accept_rounding=wanted.accept_rounding,
    )


@dataclass(frozen=True)
class _Start:
    """The message of the first process to the others: the run, its noise and its checkpoint."""

    run_id: str
    generator: Generator
    checkpoint: bytes | None


def _check_same_job(job: Job, home: Path) -> None:
    """Raise RefusedError in every process unless all have the same job, records included, and owner key."""
    settings = job.settings.performance
    sharing = settings.shard_frozen, settings.shard_trained, settings.offload, device_of(settings.device).type
    described = job.plan_file.decode(), job.info.to_json(), job.digest(home), str(sharing)
    parts = *described, str(pipeline_software().digest)
    if not job.group.agrees(hashlib.sha256("".join(parts).encode()).hexdigest()):
        raise RefusedError(
            "the processes of this run have other plans, models, data, owner keys, software, or settings of where"
            " parameters lie; give all of them the same checkout, data, owner key, software and kind of device.",
            code="processes_differ",
            differing="plans",
        )


def train_as_worker(job: Job, model: Model, *, home: Path) -> None:
    """Take the steps of a run as one of its other processes, from the first process's checkpoint; keeps nothing.

    home: folder of the owner key. Raises RefusedError if this process has another job or other records, and
    ProcessLostError if another process ends during training. If the first process ends before its first step, there is
    nothing to train, and that process reports why.
    """
    steps = list[int]()
    try:
        _take_steps(job, model, lambda step, *_: steps.append(step), home)
    except ProcessLostError:
        if steps:
            raise


def _take_steps(job: Job, model: Model, on_step: OnStep, home: Path) -> None:
    start: _Start = broadcast_sealed(job.group, None)
    _check_same_job(job, home)
    _trainer(job, model)(
        run=ResumableRun(start.run_id, start.generator, Path(os.devnull), checkpoint=start.checkpoint),
        hooks=Hooks(on_step=on_step),
    )


def main() -> None:
    """`python -P -m tasks.train`, in a checkout; `torchrun -m tasks.train` for several processes."""
    settings = params.load(Path("params.yaml"), reads=READS)
    prepared = Path("datasets/prepared")
    info = DatasetInfo.read(prepared)
    with join_processes(settings.performance.processes, home=home()) as group:
        job = Job(
            settings,
            plan_file=plan_in(Path("artifacts")),
            prepared=prepared,
            info=info,
            blocks=info.blocks or (WHOLE_POPULATION,),
            retraining=retraining(),
            group=group,
        )
        if not group.is_first:
            train_as_worker(job, model_for(settings, info), home=home())
            return
        ledger = open_newest(ledger_url(settings.ledger.url), home=home(), root=Path())
        train(job, ledger=ledger, home=home(), root=Path(), artifacts=Path("artifacts"))


if __name__ == "__main__":
    try:
        main_of(main)
    except ProcessLostError:
        raise SystemExit(
            "another process of this run has ended; start the run again: it goes on from its checkpoint, on any number"
            " of processes, and spends nothing more."
        ) from None

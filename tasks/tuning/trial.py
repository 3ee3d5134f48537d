"""One trial of a search: trained and scored in its own folder, which is deleted when the search ends."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from algorithms.core import training
from algorithms.core.method import Plan
from algorithms.core.training import asked_of_rows, of_people
from algorithms.errors import RefusedError
from algorithms.gradients import L2
from algorithms.models import Model
from algorithms.models.feature_transforms import buffers
from algorithms.privacy.accounting import Budget
from algorithms.privacy.accounting.epsilon import adjacency_named, epsilon
from algorithms.privacy.accounting.filters import ScheduleFilter
from algorithms.privacy.barrier.barrier import Barrier, Performance
from algorithms.privacy.barrier.importance import LastNorms
from algorithms.privacy.barrier.trace import Row, Trace
from algorithms.privacy.mechanisms.noise import Generator
from data import PublicDescription
from data.files import write_text
from data.prepared import load_as
from data.readers.records import Records
from tasks.calibrate import model_for
from tasks.config import params
from tasks.config.params import Params
from tasks.evaluate import load_model, metrics_of
from tasks.runs.quality import quality
from tasks.train import save_model
from tasks.tuning.pricing import READS, Document, Objective, score_release, scored

SCORE = "score.json"


@dataclass(frozen=True)
class Trial:
    """One trial, as a value that can be sent to another process; its results are in its folder.

    document: of params.yaml. plan: its document. key: of its own noise. shared: run id and folder of the features that
    were learned for all trials, if there are any.
    """

    document: Document
    plan: Document
    objective: Objective
    prepared: Path
    public: PublicDescription
    key: bytes
    private_noise: bool
    run_id: str
    folder: Path
    shared: tuple[str, Path] | None = None

    def run(self) -> None:
        """Train and score, unless that is done; a killed trial is resumed with the same noise."""
        if (self.folder / SCORE).exists():
            return
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        settings = params.parse(self.document, reads=READS)
        plan = Plan.from_json(self.plan)
        held, taught = self.records()
        start = model_for(settings, self.public)
        state, trace, model = training.train(
            settings.algorithm,
            plan,
            start,
            open_records=lambda: taught,
            generator=self._generator("training"),
            run_id=self.run_id,
            folder=self.folder,
            performance=limits(settings),
            checkpoint_seconds=settings.performance.checkpoint_seconds,
            on_step=lambda *_: None,
            features=settings.features,
            learned_before=None if self.shared is None else _shared(start, *self.shared),
        )
        released = settings.algorithm.released(state)
        file = self.folder / "model.safetensors"
        save_model(file, model, released, self.public, self.plan["algorithm"], prepared=self.prepared)
        score = (
            quality(metrics_of(file, self.prepared))
            if held is None
            else self._counted(held, plan, trace, file)
        )
        trace.write(self.folder / "trace.parquet")
        write_text(self.folder / SCORE, json.dumps(score), mode=0o600)

    def _generator(self, purpose: str) -> Generator:
        return derived(self.key, purpose, private=self.private_noise)

    def records(self) -> tuple[Records | None, Records]:
        """The records to score, None for a public objective, and those to train on, divided by their content alone."""
        data = load_as(self.prepared, self.public)
        if self.objective.on == "public":
            return None, Records(data.train_features, data.train_labels)
        rows = zip(data.train_features, data.train_labels, strict=True)
        inside = np.array([_is_held(x, y, self.objective.share) for x, y in rows])
        features, labels = np.asarray(data.train_features), np.asarray(data.train_labels)
        return Records(features[inside], labels[inside]), Records(features[~inside], labels[~inside])

    def _counted(self, held: Records, plan: Plan, trace: Trace, file: Path) -> float:
        """The noisy sum of the scores, through a separate barrier; its row is added to the trial's trace."""
        model, parameters = load_model(file)
        release, delta = score_release(self.objective), plan.target.budget.delta
        schedule = [(release.event(), 1)]
        own = Trace()
        own.step = plan.steps
        rows = self.public.pooled
        barrier = Barrier(
            held,
            of_people(model, rows),
            spend=ScheduleFilter(schedule, Budget(epsilon(schedule, delta, accountant="rdp"), delta)),
            generator=self._generator("score"),
            delta=delta,
            trace=own,
            performance=Performance(),
        )

        of_record = scored(self.public, model, parameters)
        asked = asked_of_rows(barrier, rows)
        score = float(asked.total(of_record, bound=L2(1.0), noise=release.noise)[0])
        so_far = epsilon(
            [*plan.schedule, *schedule],
            delta,
            accountant=plan.accountant,
            adjacency=adjacency_named(plan.adjacency),
        )
        row = asdict(own.rows[0]) | {"release": len(trace.rows), "epsilon": so_far}
        trace.rows.append(Row(**row))
        return score


def _is_held(features: NDArray[Any], label: NDArray[Any], share: float) -> bool:
    """A coin that depends only on the record's content, so that no other record decides on which side it is."""
    digest = hashlib.sha256(np.asarray(features).tobytes() + np.asarray(label).tobytes()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2.0**64


def derived(key: bytes, *purpose: object, private: bool) -> Generator:
    return Generator(hashlib.sha256(repr(("search", *purpose)).encode() + key).digest(), private=private)


def load_shared(model: Model, run_id: str, folder: Path) -> tuple[training.Learned, Trace] | None:
    """What all trials share, as `_share_features` wrote it into `folder`; None if it is not there."""
    form = training.Learned(buffers(model), model.initial_parameters())
    found = training.load(folder, form, run_id=run_id, last_norms=LastNorms())
    return None if found is None else (found[0], found[2])


def _shared(model: Model, run_id: str, folder: Path) -> tuple[training.Learned, Trace]:
    """Raises RefusedError if nothing is shared there: a trial must not learn it again."""
    found = load_shared(model, run_id, folder)
    if found is None:
        raise RefusedError(
            f"{folder} has nothing of what all trials share; run them where that folder can be read."
        )
    return found


def limits(settings: Params) -> Performance:
    wanted = settings.performance
    return Performance(training.device_of(wanted.device), wanted.memory_mb, wanted.physical_batch)

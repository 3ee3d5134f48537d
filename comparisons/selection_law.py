"""Measures how far DP-AGD's selections are from a coin's toss: `python -m comparisons.selection_law FOLDER`.

By epsilon, on the public records of comparisons/dp-agd-coin.yaml: the total variation between the law of each choice
and the uniform one, by the exact losses of all candidates, mean over the choices of a run and over folds; and what the
plan states for it without looking at records. For Gumbel noise the law is a softmax of the losses over the noise's
scale.
"""

from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import typer
from torch import Tensor

from algorithms.methods import from_settings
from algorithms.models import Model, build
from algorithms.privacy.barrier.barrier import Barrier, ComputeConfig
from algorithms.privacy.barrier.trace import Trace
from algorithms.privacy.mechanisms.noise import seeded_generator
from data.readers.records import RecordBatch
from tasks.comparing.definition import Trial
from tasks.comparing.trial import TrialContext, plan_trial, trial_records
from tasks.comparing.work import prepare_data, work_of

COMPARISON = Path(__file__).with_name("dp-agd-coin.yaml")
FOLDS = 3


class ObservedBarrier(Barrier):
    """A barrier over public records that keeps how far the law of each of its choices is from uniform."""

    def observe(self, records: RecordBatch, model: Model, scale: float) -> None:
        """Set what the law is computed from. scale: of the noise on a total loss."""
        self._inputs = torch.from_numpy(records.features)
        self._labels, self._model, self._scale = torch.from_numpy(records.labels), model, scale
        self.distances: list[float] = []

    def argmin(self, candidates: Any, **terms: Any) -> int:
        """Choose as usual, and keep the distance."""
        losses = torch.stack([self._total(point, terms["bound"]) for point in candidates.candidates])
        law = torch.softmax(-losses / self._scale, dim=0)
        self.distances.append(float((law - 1.0 / len(law)).clamp(min=0).sum()))
        return super().argmin(candidates, **terms)

    def _total(self, point: Tensor, bound: float) -> Tensor:
        outputs = self._model.outputs(self._model.by_name(point), self._inputs)
        return self._model.losses(outputs, self._labels).clamp(0.0, bound).double().sum()


def distance_of(context: TrialContext, trial: Trial) -> dict[str, Any]:
    """The mean distance of a run's choices, and the one that its plan states."""
    plan, data = plan_trial(context, trial), trial_records(context.workspace.store, trial)
    model = build(trial.model, input_shape=data.info.input_shape, classes=2, seed=trial.seed)
    method, records, trace = from_settings(trial.settings), data.train, Trace()
    barrier = ObservedBarrier(
        records,
        model,
        privacy_filter=plan.open_filter(),
        generator=seeded_generator(trial.noise_seed),
        delta=trial.delta,
        trace=trace,
        compute=plan.with_public_sizes(ComputeConfig()),
    )
    law: Any = plan.method_params["selection_law"]
    barrier.observe(records, model, law["noise_scale"])
    state = method.init(model.initial_parameters(), plan)
    for trace.step in range(plan.steps):
        following = method.step(state, plan, barrier)
        if following is None:
            break
        state = following
    distance = float(torch.tensor(barrier.distances).mean())
    return {
        "dataset": trial.dataset,
        "epsilon": trial.epsilon,
        "measured": distance,
        "stated": law["distance"],
    }


def main(
    folder: Annotated[Path, typer.Argument(help="Where selection-law.csv goes; made if it is not there.")],
    folds: Annotated[int, typer.Option(help="How many folds of each data set and epsilon.")] = FOLDS,
) -> None:
    """Measure the distance of DP-AGD's selections from uniform draws."""
    torch.set_num_threads(1)
    work = work_of(COMPARISON, Path.cwd())
    prepare_data(work)
    wanted = [
        trial
        for trial in work.trials
        if trial.method == "selected"
        and trial.fold is not None
        and trial.fold.repeat == 0
        and trial.fold.fold < folds
    ]
    table = pd.DataFrame([distance_of(work.context, trial) for trial in wanted])
    folder.mkdir(parents=True, exist_ok=True)
    means = table.groupby(["dataset", "epsilon"], sort=False).mean().reset_index()
    means.round(5).to_csv(folder / "selection-law.csv", index=False)


if __name__ == "__main__":
    typer.run(main)

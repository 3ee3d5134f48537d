"""The recipes of convex.yaml with many draws of the noise: `python -m comparisons.convex_draws FOLDER`.

The comparison has one draw a fold, which hides differences of a thousandth. Here each plan of its DP-GD runs up to
epsilon 0.4, with the noise that it charges for each step, descends from many draws at once, on the same folds. Methods
share the normals of their steps, so differences between them are paired. The records are public, so noise is seeded
and charged to nobody.

The rule, set before it ran: of each recipe, epsilon and data set the mean difference from DP-GD over a fold's draws is
one number, and a win stays certain at 5 percent by Holm among all two-sided t tests over the folds. The same, in a
family of its own, for matched noise against constant noise with the same momentum.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import pandas as pd
import torch
import typer
from scipy import stats
from torch import Tensor

from algorithms.core.plan import Plan
from algorithms.features import Preconditioned
from algorithms.methods import from_settings
from algorithms.methods.dp_sgd import DPGD
from algorithms.models.feature_transforms import unit_length
from algorithms.privacy.accounting.epsilon import Array
from algorithms.privacy.mechanisms.release import Gaussian
from comparisons.adaclip_whitening import as_vectors
from tasks.comparing.definition import Trial
from tasks.comparing.trial import TrialRecords, plan_trial, trial_records
from tasks.comparing.work import ComparisonWork, lock_comparison, prepare_data, work_of

COMPARISON, DRAWS, AT_MOST = Path(__file__).with_name("convex.yaml"), 8, 0.4
PAIRS = (("matched", "dp_gd"), ("together", "dp_gd"), ("matched", "ahead"))
"""What is compared with what."""


@dataclass(frozen=True)
class Moment:
    """A stand-in for the barrier that knows one noisy second moment of the records, of unit length."""

    records: Tensor
    generator: torch.Generator

    def moment(self, _statistic: object, *, bound: object, noise: Gaussian) -> Tensor:
        """The sum of products plus noise on its upper triangle, [d, d]."""
        del bound
        total = (self.records.T @ self.records).double()
        draws = torch.randn(total.shape, generator=self.generator, dtype=torch.float64).triu()
        return total + noise.multiplier * (draws + draws.triu(1).T)


def inputs_of(trial: Trial, data: TrialRecords, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The records for training and testing, [n, d], behind the trial's features, with a last column of ones."""
    parts = [as_vectors(part.features)[:, :-1] for part in (data.train, data.test)]
    if trial.features:
        train, test = (unit_length(part) for part in parts)
        settings = {key: value for key, value in trial.features.items() if key != "name"}
        barrier = Moment(train, generator)
        learned = Preconditioned(**settings).learn(barrier, train.shape[1:], float(len(train)))  # type: ignore[arg-type]
        parts = [train @ learned["matrix"], test @ learned["matrix"]]
    return tuple(torch.cat([part, torch.ones(len(part), 1)], dim=1) for part in parts)  # type: ignore[return-value]


def descend(
    method: DPGD, plan: Plan, inputs: Tensor, labels: Tensor, *, draws: int, generator: torch.Generator
) -> Tensor:
    """The last iterates of DP-GD on the logistic loss, [d, draws]. inputs: [n, d]. labels: 1 or -1, [n]."""
    signed, norms = inputs * labels[:, None], inputs.norm(dim=1, keepdim=True)
    state = method.update.start(torch.zeros(inputs.shape[1], draws))
    for step in range(plan.steps):
        slopes = torch.sigmoid(-(signed @ state.parameters)).minimum(method.clip_norm / norms)
        noise = method.clip_norm * method.multiplier_at(plan, step)
        total = noise * torch.randn(state.parameters.shape, generator=generator) - signed.T @ slopes
        state = method.update.apply(state, total / len(inputs), steps=plan.steps)
    return method.update.published_parameters(state)


def accuracies(work: ComparisonWork, trial: Trial, *, draws: int, seed: int) -> Array:
    """The accuracy on the fold's test records of each draw, [draws]."""
    data, plan = trial_records(work.context.workspace.store, trial), plan_trial(work.context, trial)
    generator = torch.Generator().manual_seed(seed)
    inputs, held_out = inputs_of(trial, data, torch.Generator().manual_seed(10**6 + seed))
    method = from_settings(trial.settings)
    assert isinstance(method, DPGD)
    labels = 2.0 * torch.from_numpy(np.array(data.train.labels)).float() - 1.0
    point = descend(method, plan, inputs, labels, draws=draws, generator=generator)
    expected = torch.from_numpy(np.array(data.test.labels)) == 1
    right: Array = ((held_out @ point > 0) == expected[:, None]).double().mean(dim=0).numpy()
    return right


def summary(rows: pd.DataFrame) -> pd.DataFrame:
    """The differences of `PAIRS` by data set and epsilon, with their p by Holm among those from the same base."""
    folds = rows.groupby(["dataset", "epsilon", "fold", "method"])["accuracy"].mean().unstack("method")
    gains_of_pairs = []
    for (dataset, epsilon), part in folds.groupby(level=["dataset", "epsilon"]):
        for method, base in PAIRS:
            gain = part[method] - part[base]
            keys = {"dataset": dataset, "epsilon": epsilon, "method": method, "base": base}
            means = {"accuracy": part[method].mean(), "base_accuracy": part[base].mean()}
            gains = {"gain": gain.mean(), "gain_stderr": gain.sem(), "p": stats.ttest_1samp(gain, 0.0).pvalue}
            gains_of_pairs.append(keys | means | gains)
    table = pd.DataFrame(gains_of_pairs).round(5)
    return table.assign(holm=table.groupby("base")["p"].transform(by_holm).round(5))


def by_holm(values: pd.Series) -> pd.Series:
    """The p of several tests, corrected for their number (Holm 1979)."""
    order = values.sort_values()
    return (order * np.arange(len(order), 0, -1)).cummax().clip(upper=1.0)


def main(
    folder: Annotated[Path, typer.Argument(help="Where convex-draws.csv goes; made if it is not there.")],
    draws: Annotated[int, typer.Option(help="How many runs of each fold.")] = DRAWS,
    comparison: Annotated[Path, typer.Option(help="The recipes, their epsilons and folds.")] = COMPARISON,
) -> None:
    """Compare the recipes with DP-GD over many draws of the noise; a row for each recipe."""
    torch.set_num_threads(1)
    work, rows = work_of(comparison, Path.cwd()), []
    prepare_data(work)
    folder.mkdir(parents=True, exist_ok=True)
    trials = [trial for trial in work.trials if trial.settings["name"] == "dp_gd"]
    trials = [trial for trial in trials if trial.epsilon is not None and trial.epsilon <= AT_MOST]
    with lock_comparison(work.workspace):  # which has the folder of the plans
        for trial in trials:
            assert trial.fold is not None
            fold = trial.fold.repeat * trial.fold.k + trial.fold.fold
            named = {
                "dataset": trial.dataset,
                "epsilon": trial.epsilon,
                "method": trial.method,
                "fold": fold,
            }
            scores = accuracies(work, trial, draws=draws, seed=fold + 1)
            rows += [named | {"accuracy": float(one)} for one in scores]
    summary(pd.DataFrame(rows)).to_csv(folder / "convex-draws.csv", index=False)


if __name__ == "__main__":
    typer.run(main)

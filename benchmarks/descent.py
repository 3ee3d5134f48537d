"""Benchmark of a whole step of DP-AGD: `python -m benchmarks.descent`.

The iteration of workload W1 (one clipped gradient and 20 candidates) is measured with the library and with Opacus.
The library's whole step is measured through the barrier: with charges, trace and secure noise, the step size 0 among
the candidates, and a second measurement where no step helps.
"""

import time
from typing import Annotated

import torch
import typer
from rich.console import Console
from torch import Tensor

from algorithms.core.plan import Target
from algorithms.core.planning_facts import Inputs, PlanningFacts
from algorithms.methods.dp_agd import DPAGD, AGDState
from algorithms.privacy.accounting import Budget
from algorithms.privacy.barrier.barrier import Barrier, ComputeConfig
from algorithms.privacy.barrier.trace import Trace
from algorithms.privacy.mechanisms.noise import secure_generator
from benchmarks.importance import SyntheticRecords
from benchmarks.line import STEPS
from benchmarks.line_search import ClosedForm
from benchmarks.line_search_peers import Hooks
from benchmarks.measure import Plan, alternate, spread
from benchmarks.methods import Method, Problem
from benchmarks.workloads import WORKLOADS

_TARGET = Target(Budget(1.0, 1e-8))
_GRID = (0.0, *(step / STEPS[-1] for step in STEPS))


class WholeStep:
    """A step of DP-AGD through the barrier; a run that has spent its budget is restarted."""

    def __init__(self, problem: Problem) -> None:
        self.model, self.method = problem.model(), DPAGD(steps_grid=_GRID)
        self.data = SyntheticRecords(problem.inputs.numpy(), problem.labels.numpy())
        longest = float(problem.inputs.norm(dim=1).max())
        facts = PlanningFacts(
            len(self.data.labels),
            self.model.parameter_count,
            len(self.model.layers),
            2,
            inputs=Inputs(longest * problem.inputs.shape[1] ** 0.5, longest),
            loss=self.model.bounds,
        )
        self.plan = self.method.plan(_TARGET, facts)
        self.barrier, self.state = self._begun()

    def step(self) -> None:
        """One iteration, which may measure twice."""
        following = self.method.step(self.state, self.plan, self.barrier)
        if following is None:
            self.barrier, self.state = self._begun()
        else:
            self.state = following

    def wait(self) -> None:
        """Nothing to wait for on a CPU."""

    def released(self) -> dict[str, Tensor]:
        """The current parameters."""
        return {"parameters": self.state.parameters}

    def _begun(self) -> tuple[Barrier, AGDState]:
        barrier = Barrier(
            self.data,
            self.model,
            privacy_filter=self.plan.open_filter(),
            generator=secure_generator(),
            delta=_TARGET.budget.delta,
            trace=Trace(),
            compute=ComputeConfig(number=self.plan.facts.records),
        )
        return barrier, self.method.init(self.model.initial_parameters(), self.plan)


def main(rounds: Annotated[int, typer.Option(min=2)] = 15) -> None:
    """Compare a step of DP-AGD and its iteration with Opacus's hooks; CPU time on one thread."""
    torch.set_num_threads(1)
    chosen = WORKLOADS["W1"]
    problem = Problem(chosen, *chosen.data(chosen.batch, torch.device("cpu")))
    methods: dict[str, Method] = {
        "Opacus hooks": Hooks(problem),
        "iteration": ClosedForm(problem),
        "whole step": WholeStep(problem),
    }
    times = alternate(methods, Plan(rounds=rounds, warmup=2, repeat=False), time.process_time)
    medians, console = {name: spread(values)["median"] for name, values in times.items()}, Console()
    for name, median in medians.items():
        console.print(f"{name}: {median:.2f} ms, Opacus / this: {medians['Opacus hooks'] / median:.1f}")


if __name__ == "__main__":
    typer.run(main)

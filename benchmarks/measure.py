"""Measures one workload in its own process: first that the methods agree, then their times in alternation.

CPU times are process CPU time on one thread, which other programs on the machine hardly disturb; GPU times are wall
time between synchronisations, of one method after the other.
"""

import gc
import logging
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from algorithms.gradients import replay
from benchmarks.gpu_memory import growth_on_gpu
from benchmarks.methods import Method, NotAvailableError, Problem, names, start, trained
from benchmarks.workloads import Workload

TOLERANCE = 1e-4
"""The largest relative difference between clipped sums at which the methods are still timed."""

_OTHER_SUMS = ("plain", "ours_l2")
"""Methods that are timed for comparison but compute a different result."""

_FEW = 32

_SHORTEST = 0.2
"""Seconds; shorter steps are repeated until one timing takes this long."""

_PAUSE, _PATIENCE = 0.005, 100
"""Seconds between checks that the process is idle, and the largest number of checks."""

_logger = logging.getLogger(__name__)


class DisagreementError(Exception):
    """Methods that should agree do not; the message names them."""


@dataclass(frozen=True)
class Plan:
    """How long to measure: warm-up rounds, timed rounds, and whether short steps are repeated."""

    rounds: int
    warmup: int
    repeat: bool


@dataclass
class Missing:
    """Methods without a time, each with a sentence on what it lacks or how it failed."""

    not_available: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def try_out(self, name: str, problem: Problem) -> Method | None:
        """The method after a first step; None, with the reason noted, if that fails."""
        try:
            method = start(name, problem)
            method.step()
            method.wait()
        except NotAvailableError as error:
            self.not_available[name] = str(error)
        except torch.OutOfMemoryError:
            torch.accelerator.empty_cache()
            self.not_available[name] = f"{name} needs more memory than the GPU has."
        except Exception as error:  # the other methods must still be measured
            _logger.exception("%s failed on %s", name, problem.workload.name)
            self.failed[name] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        else:
            return method
        return None


def speed(workload: Workload, device: torch.device, plan: Plan, *, autocast: bool) -> dict[str, Any]:
    """Agreement and times of one workload, as JSON; times in milliseconds per step.

    Raises DisagreementError, before anything is timed, if the methods' clipped sums differ.
    """
    missing = Missing()
    differences = agreement(workload, device, missing)
    problem = timed_problem(workload, device, autocast=autocast)
    left = [name for name in names(workload) if name not in missing.not_available | missing.failed]
    times, growths = (_together if device.type == "cpu" else _in_turn)(left, problem, plan, missing)
    return {
        "times_ms": {name: spread(values) for name, values in times.items()},
        "difference": differences,
        "growth_mb": growths,
        **asdict(missing),
    }


def _together(
    left: Sequence[str], problem: Problem, plan: Plan, missing: Missing
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """The times of all methods, in alternation; their memory is measured in processes of their own."""
    methods = {name: method for name in left if (method := missing.try_out(name, problem)) is not None}
    return alternate(methods, plan, time.process_time), {}


def _in_turn(
    left: Sequence[str], problem: Problem, plan: Plan, missing: Missing
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """The times of all methods, and the growth of the GPU's memory in MB; in turn, since each may need all of it."""
    times, growths = dict[str, list[float]](), dict[str, float]()
    for name in left:
        if (method := missing.try_out(name, problem)) is not None:
            times |= alternate({name: method}, plan, time.perf_counter)
            growths[name] = growth_on_gpu(method, name)
        del method
        gc.collect()
        torch.accelerator.empty_cache()
    return times, growths


def timed_problem(
    workload: Workload, device: torch.device, *, autocast: bool, records: int | None = None
) -> Problem:
    """The batch that is timed; a line search stays in float32, to tell close objectives apart."""
    if records is None:
        records = workload.batch if device.type == "cpu" else workload.device_batch
    inputs, labels = workload.data(records, device)
    return Problem(workload, inputs, labels, autocast=autocast and workload.task != "line search")


def agreement(workload: Workload, device: torch.device, missing: Missing) -> dict[str, float]:
    """The relative difference of each private method from the first after one step without noise.

    The step is the one that is timed, with a learning rate that makes it subtract the clipped sum, and a clip norm
    that clips some records but not others. Raises DisagreementError above TOLERANCE.
    """
    timed = Problem(workload, *workload.data(workload.batch, device))
    problem = replace(
        timed, clip_norm=_middle_norm(timed), noise_multiplier=0.0, learning_rate=float(workload.batch)
    )
    start_at = workload.build().initial_parameters().double()
    changes = {}
    for name in names(workload):
        method = missing.try_out(name, problem)
        if method is not None and name not in _OTHER_SUMS:
            released = method.released()
            changes[name] = {**released, "parameters": released["parameters"] - start_at}
    if workload.peers_may_differ:  # ours becomes the reference, and is checked against vmap alone
        changes = {name: changes[name] for name in ("ours", *changes) if name in changes}
    differences = _differences(changes)
    checked = ("vmap",) if workload.peers_may_differ else tuple(differences)
    wrong = {name: differences[name] for name in checked if not differences.get(name, 0.0) <= TOLERANCE}
    if wrong:
        listed = ", ".join(f"{name} by {value:.1e}" for name, value in wrong.items())
        raise DisagreementError(
            f"on {workload.name} the clipped sums differ from those of {next(iter(differences))}: {listed},"
            f" which is more than {TOLERANCE:g}; nothing was timed."
        )
    return differences


def _middle_norm(problem: Problem) -> float:
    """The median norm of a few records' gradients, each from its own backward pass."""
    model = problem.model()
    norms = []
    for index in range(min(_FEW, len(problem.labels))):
        record = slice(index, index + 1)
        loss = model.losses(model.module(problem.inputs[record]), problem.labels[record]).sum()
        gradients = torch.autograd.grad(loss, list(trained(model.module).values()))
        norms.append(math.hypot(*(float(gradient.norm()) for gradient in gradients)))
    return statistics.median(norms)


def _differences(changes: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, float]:
    """Each method's largest relative distance to the first method, over everything that it releases."""
    if not changes:
        return {}
    reference = next(iter(changes.values()))
    return {
        name: max(
            float(torch.linalg.vector_norm(change[key] - value) / torch.linalg.vector_norm(value))
            for key, value in reference.items()
        )
        for name, change in changes.items()
    }


class Timed:
    """A function that is timed as a method is."""

    def __init__(self, run: Callable[[], object]) -> None:
        self._run = run

    def step(self) -> None:
        """Call it once."""
        self._run()

    def wait(self) -> None:
        """Nothing runs on after a step."""

    def released(self) -> dict[str, Tensor]:
        """Nothing is compared."""
        return {}


def alternate(
    methods: Mapping[str, Method], plan: Plan, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Seconds per step of each method in each round; every round has another order.

    Passes are replayed from the first one on, as they are in a run after its first ones. The step that traces them is
    not timed: by its seconds a short step would be repeated once or twice, and find none of its data in the caches.
    """
    replay.RECORDED = 0
    for method in methods.values():
        method.step()
        method.wait()
    repeats = dict.fromkeys(methods, 1)
    for _ in range(plan.warmup):
        for name, method in methods.items():
            once = _seconds(method, 1, clock)
            repeats[name] = max(1, round(_SHORTEST / max(once, 1e-6))) if plan.repeat else 1
    times: dict[str, list[float]] = {name: [] for name in methods}
    order, chance = list(methods), random.Random(0)
    for _ in range(plan.rounds):
        chance.shuffle(order)
        for name in order:
            times[name].append(_seconds(methods[name], repeats[name], clock))
    return times


def _seconds(method: Method, repeats: int, clock: Callable[[], float]) -> float:
    _let_others_finish()
    if repeats > 1:  # the caches then hold this method's data, as in a training loop
        method.step()
    method.wait()
    begin = clock()
    for _ in range(repeats):
        method.step()
    method.wait()
    return (clock() - begin) / repeats


def _let_others_finish() -> None:
    """Wait until the process is idle: JAX frees memory in its own threads after a step."""
    for _ in range(_PATIENCE):
        busy = time.process_time()
        time.sleep(_PAUSE)
        if time.process_time() - busy < 0.1 * _PAUSE:
            return


def spread(seconds: list[float]) -> dict[str, float]:
    """Median, minimum and quartiles in milliseconds."""
    lower, median, upper = statistics.quantiles(seconds, n=4, method="inclusive")
    values = {"median": median, "min": min(seconds), "lower_quartile": lower, "upper_quartile": upper}
    return {name: round(1000 * value, 4) for name, value in values.items()}

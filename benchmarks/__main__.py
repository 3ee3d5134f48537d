"""Command line: `python -m benchmarks` measures, prints tables and keeps the numbers in benchmarks/results."""

import datetime
import logging
import statistics
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from benchmarks import machine, record
from benchmarks.child import ALLOCATORS, Job, JobFailedError, run
from benchmarks.methods import names
from benchmarks.table import remarks, table
from benchmarks.workloads import DEFAULT, WORKLOADS, Workload

_ALL = ",".join(DEFAULT)
_WIDTH = 110
_MEMORY_PROCESSES = 3

_logger = logging.getLogger(__name__)

Names = Annotated[str, typer.Option(help="Comma-separated; all of them by default.")]
Rounds = Annotated[int, typer.Option(min=2, help="Timed rounds; in each, every method steps.")]
Quick = Annotated[
    bool, typer.Option(help="Two rounds, one allocator, no memory, nothing kept: does it work?")
]
Device = Annotated[str, typer.Option(help="auto, cpu, or the name of an accelerator that PyTorch sees.")]
Autocast = Annotated[bool, typer.Option(help="Forward passes in bfloat16, except for the line search.")]


def main(
    workloads: Names = _ALL,
    rounds: Rounds = 7,
    quick: Quick = False,
    device: Device = "auto",
    autocast: Autocast = False,
) -> None:
    """Measure clipped gradients against other libraries, one process for each workload and allocator setting."""
    chosen = [_workload(name) for name in workloads.split(",")]
    where = device_of_name(device)
    console = Console(width=max(_WIDTH, Console().width))
    failed = False
    for workload in chosen:
        try:
            result = measure_workload(
                workload, where, rounds=2 if quick else rounds, quick=quick, autocast=autocast
            )
        except JobFailedError as error:
            _logger.error("%s", error)
            failed = True
            continue
        console.print(table(result), *remarks(result), "", sep="\n")
        failed = failed or any(part["failed"] for part in result["speed"].values())
        if not quick:
            kind = "cpu" if where.type == "cpu" else "gpu"
            record.save(kind + ("-bfloat16" if autocast else ""), {workload.name: result})
    raise typer.Exit(1 if failed else 0)


def _workload(name: str) -> Workload:
    if name not in WORKLOADS:
        raise typer.BadParameter(f"there is no workload {name!r}; choose from {', '.join(WORKLOADS)}.")
    return WORKLOADS[name]


def device_of_name(name: str) -> torch.device:
    here = torch.accelerator.current_accelerator(check_available=True)
    if name not in ("auto", "cpu", here.type if here is not None else "cpu"):
        seen = "no accelerator" if here is None else here.type
        raise typer.BadParameter(f"PyTorch sees {seen} here, and not {name!r}; choose auto or cpu.")
    return torch.device("cpu") if here is None or name == "cpu" else here


def measure_workload(
    workload: Workload, device: torch.device, *, rounds: int, quick: bool, autocast: bool
) -> dict[str, Any]:
    """The record of one workload; raises JobFailedError where the methods disagree or a process dies."""
    allocators = list(ALLOCATORS)[: 1 if quick or device.type != "cpu" else None]
    job = Job(workload.name, device.type, autocast, rounds, warmup=1 if quick else 3, repeat=not quick)
    speeds = {allocator: _measure_speed(job, allocator) for allocator in allocators}
    timed = list(speeds[allocators[0]]["times_ms"])
    return {
        "workload": workload.name,
        "about": workload.about,
        "device": device.type + (", bfloat16" if autocast else ""),
        "batch": workload.batch if device.type == "cpu" else workload.device_batch,
        "parameters": workload.build().parameter_count,
        "rounds": rounds,
        "methods": list(names(workload)),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine.describe(device),
        "versions": machine.versions(),
        "allocators": {name: ALLOCATORS[name] for name in allocators},
        "speed": speeds,
        "memory": {} if quick else _memory(workload, timed, device, speeds, autocast=autocast),
    }


def _measure_speed(job: Job, allocator: str) -> dict[str, Any]:
    result = run(job, allocator)
    if "refused" in result:
        raise JobFailedError(result["refused"])
    return {**result, "ratios": record.ratios(result["times_ms"])}


def _memory(
    workload: Workload, timed: list[str], device: torch.device, speeds: dict[str, Any], *, autocast: bool
) -> dict[str, dict[str, float]]:
    """Memory of the methods that could be timed, under the default allocator; failures are logged and left out.

    On a CPU it is the median over several processes, since what the allocator keeps differs between them; on a GPU it
    was measured after the times.
    """
    if device.type != "cpu":
        return record.memory(next(iter(speeds.values()))["growth_mb"])
    growths = {}
    for name in timed:
        job = Job(workload.name, device.type, autocast, memory_of=name)
        try:
            growth = [run(job, "default")["growth_mb"] for _ in range(_MEMORY_PROCESSES)]
        except JobFailedError as error:
            _logger.error("%s", error)
        else:
            growths[name] = statistics.median(growth)
    return record.memory(growths)


if __name__ == "__main__":
    typer.run(main)

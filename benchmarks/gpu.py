"""Benchmark on a GPU: `python -m benchmarks.gpu` tests sums and methods there and compares them with other libraries.

The numbers go to benchmarks/results/gpu.json, the table to docs/results/gpu.md. `--device cpu --small` does the same
with small networks on a CPU and keeps nothing, to check without a GPU that every part runs.
"""

import logging
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import record
from benchmarks.__main__ import device_of_name, measure_workload
from benchmarks.child import JobFailedError
from benchmarks.workloads import DEFAULT, OF_LIBRARIES, SMALL, WORKLOADS

_TESTS = (
    "tests/algorithms/gradients/test_device.py",
    "tests/algorithms/gradients/test_determinism.py",
    "tests/algorithms/gradients/test_memory.py",
    "tests/algorithms/core/test_optimizers.py",
    "tests/algorithms/test_features.py",
    "tests/algorithms/core/test_user_level.py",
    "tests/algorithms/methods/test_contract.py",
    "tests/algorithms/privacy/barrier/test_process_group.py",  # on two GPUs, where available
)
_TABLE = Path("docs/results/gpu.md")
_PEERS = {
    "opacus_hooks": "Opacus hooks",
    "opacus_ghost": "Opacus ghost",
    "jax": "JAX",
    "plain": "plain PyTorch",
}

_logger = logging.getLogger(__name__)


def main(
    device: Annotated[str, typer.Option(help="auto, or cpu to see that it runs.")] = "auto",
    small: Annotated[bool, typer.Option(help="Small networks, two rounds, nothing kept.")] = False,
    workloads: Annotated[str, typer.Option(help="Comma-separated; all of them by default.")] = "",
    tests: Annotated[bool, typer.Option(help="Run the tests on the device first.")] = True,
) -> None:
    """Test on a device, measure there, and write the table."""
    where = device_of_name(device)
    if where.type == "cpu" and device != "cpu":
        raise typer.BadParameter(
            "PyTorch sees no GPU here; use --device cpu --small to see that all of it runs."
        )
    if tests:
        environment = os.environ | {"EPSILONFLOW_TEST_DEVICE": where.type}
        subprocess.run([sys.executable, "-m", "pytest", "-q", *_TESTS], env=environment, check=True)
    names = workloads.split(",") if workloads else [*DEFAULT, *OF_LIBRARIES] if not small else [*SMALL]
    results: dict[str, Any] = {}
    for name in names:
        chosen = SMALL[name] if small else WORKLOADS[name]
        try:
            results[name] = measure_workload(
                chosen, where, rounds=2 if small else 7, quick=small, autocast=False
            )
        except JobFailedError as error:  # the other networks must still be measured
            _logger.error("%s", error)
            continue
        if not small:
            record.save("cpu" if where.type == "cpu" else "gpu", {name: results[name]})
            _TABLE.write_text(table(results), encoding="utf-8")
    typer.echo(table(results))
    raise typer.Exit(0 if len(results) == len(names) else 1)


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """A page with one row per workload: our speed relative to each peer, and memory growth over plain PyTorch.

    A dash marks a peer that could not run; a peer whose sum is off by more than 1e-4 is shown with its error.
    """
    first = next(iter(results.values()), None)
    lines = ["# Clipped steps on a GPU", ""]
    if first is not None:
        lines += [f"Measured {first['date']} on {first['machine'].get('gpu', first['machine']['cpu'])}.", ""]
    lines += ["| workload | records | ms | " + " | ".join(_PEERS.values()) + " | memory over plain |"]
    lines += ["| --- " * (4 + len(_PEERS)) + "|"]
    for one in results.values():
        settings = next(iter(one["speed"].values()))
        times = {name: spread["median"] for name, spread in settings["times_ms"].items()}
        ours = times.get("ours")
        cells = [_cell(times.get(peer), ours, settings["difference"].get(peer, 0.0)) for peer in _PEERS]
        grown = one["memory"].get("ours", {}).get("over_plain")
        last = "-" if grown is None else f"{grown:.2f}"
        about = [one["about"], f"{one['batch']:,}", "-" if ours is None else f"{ours:.1f}"]
        lines.append("| " + " | ".join([*about, *cells, last]) + " |")
    return "\n".join(lines) + "\n"


def _cell(theirs: float | None, ours: float | None, difference: float) -> str:
    if theirs is None or ours is None:
        return "-"
    return f"{theirs / ours:.2f}" + (f" (off by {difference:.0e})" if difference > 1e-4 else "")


if __name__ == "__main__":
    typer.run(main)

"""The measuring process: python -m benchmarks.child '{"workload": ...}' prints its result as JSON.

The allocator and the number of threads are set by environment variables, which are read only when a process starts.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "NPROC": "1",  # read by XLA as the number of cores
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # else JAX takes most of the GPU's memory from PyTorch
    "PYTHONWARNINGS": "ignore",
}

ALLOCATORS: Mapping[str, dict[str, str]] = {
    "default": {},
    "tuned": {
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": "8000000000",
        "MALLOC_TOP_PAD_": "300000000",
    },
}
"""glibc's settings; "tuned" keeps freed memory instead of returning it to the kernel after every large tensor."""


@dataclass(frozen=True)
class Job:
    """What one process measures: the times of a workload's methods, or the memory of one of them."""

    workload: str
    device: str
    autocast: bool
    rounds: int = 0
    warmup: int = 0
    repeat: bool = True
    memory_of: str | None = None


class JobFailedError(Exception):
    """A measuring process that ended without a result."""


def run(job: Job, allocator: str) -> dict[str, Any]:
    """The result of a job, measured in a new process; raises JobFailedError if there is none."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    # The workspace is what repeatable products need, as in a run.
    only = {"JAX_PLATFORMS": "cpu"} if job.device == "cpu" else {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.child", json.dumps(asdict(job))],
        env={**environment, **ONE_THREAD, **only, **ALLOCATORS[allocator]},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise JobFailedError(f"measuring {job.workload} ended with status {done.returncode}; see above.")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def _measure(job: Job) -> dict[str, Any]:
    import torch

    from benchmarks.measure import DisagreementError, Plan, speed
    from benchmarks.memory import growth
    from benchmarks.workloads import WORKLOADS

    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False
    workload, device = WORKLOADS[job.workload], torch.device(job.device)
    if job.memory_of is not None:
        return {"growth_mb": growth(workload, job.memory_of, device, autocast=job.autocast)}
    try:
        return speed(workload, device, Plan(job.rounds, job.warmup, job.repeat), autocast=job.autocast)
    except DisagreementError as error:
        return {"refused": str(error)}


if __name__ == "__main__":
    result = _measure(Job(**json.loads(sys.argv[1])))
    sys.stdout.write(json.dumps(result) + "\n")

"""Batches of changing size, as Poisson sampling gives them, do not fill the memory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WARM_UP, PASSES, ALLOWED_MB = 40, 250, 24

SCRIPT = """
import random, resource, sys
import torch
from algorithms.gradients import L2
from tests.gradients.networks import AS_A_WHOLE, NETWORKS
from tests.gradients.zoo import problem

name, warm_up, passes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
made = problem((NETWORKS | AS_A_WHOLE)[name], torch.float32, count=96)
engine = made.engine(physical_batch=48)
draw = random.Random(0)

def resident():
    with open("/proc/self/statm") as pages:
        return int(pages.read().split()[1]) * resource.getpagesize() / 1e6

def run(count):
    some = made.some(slice(0, count))
    engine.clipped_sum(*some.arguments, L2(1.0))
    engine.norms(*some.arguments, L2(1.0))

for count in (96, *(draw.randrange(97) for _ in range(warm_up))):
    run(count)
before = resident()
for _ in range(passes):
    run(draw.randrange(97))
print(resident() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
@pytest.mark.parametrize("name", ["cnn", "bilstm", "merged low-rank adaptation"])
def test_many_passes_do_not_fill_the_memory(name: str) -> None:
    """Measured in a process of its own, after the largest batch has been met."""
    command = [sys.executable, "-c", SCRIPT, name, str(WARM_UP), str(PASSES)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < ALLOWED_MB

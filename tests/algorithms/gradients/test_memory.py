"""Batches of changing size, as Poisson sampling gives them, do not fill the memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
NAMES = ["cnn", "bilstm", "merged low-rank adaptation"]
WARM_UP, PASSES, ALLOWED_MB = 20, 80, 12

SCRIPT = """
import json, random, resource, sys
import torch
from algorithms.gradients import L2
from tests.algorithms.gradients.networks import AS_A_WHOLE, NETWORKS, OF_PARAMETERS
from tests.algorithms.gradients.zoo import problem

def resident():
    with open("/proc/self/statm") as pages:
        return int(pages.read().split()[1]) * resource.getpagesize() / 1e6

def grown(name, warm_up, passes):
    made, draw = problem((NETWORKS | OF_PARAMETERS | AS_A_WHOLE)[name], torch.float32, count=96), random.Random(0)
    engine = made.engine(physical_batch=48)
    for done, count in enumerate([96, *(draw.randrange(97) for _ in range(warm_up + passes))]):
        if done == warm_up:
            before = resident()
        some = made.some(slice(0, count))
        engine.clipped_sum(*some.arguments, L2(1.0))
        engine.norms(*some.arguments, L2(1.0))
    return resident() - before

names, warm_up, passes = json.loads(sys.argv[1])
print(json.dumps([grown(name, warm_up, passes) for name in names]))
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
def test_many_passes_do_not_fill_the_memory() -> None:
    """Measured in a process of its own, after the largest batch has been met."""
    command = [sys.executable, "-c", SCRIPT, json.dumps([NAMES, WARM_UP, PASSES])]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    grown = json.loads(done.stdout)
    assert len(grown) == len(NAMES)
    assert all(megabytes < ALLOWED_MB for megabytes in grown), grown

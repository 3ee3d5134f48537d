"""Records in a mapped file that is larger than the memory: the same answers, and the file's pages are let go."""

from pathlib import Path

import numpy as np
import pytest
import torch

from algorithms.gradients import L2
from algorithms.models import build
from algorithms.privacy.barrier.barrier import ComputeConfig
from algorithms.privacy.mechanisms.release import Gaussian
from algorithms.privacy.mechanisms.sampling import FullBatch, Poisson
from tests.support.barriers import barrier
from tests.support.bench import MadeUp

RECORDS, WIDTH = 5_000, 256
MODEL = build("logistic", input_shape=(WIDTH,), classes=2, seed=0)
SMALL = ComputeConfig(memory_mb=1)
"""A fifth of what the features take."""


@pytest.fixture
def mapped(tmp_path: Path) -> MadeUp:
    draw = np.random.default_rng(0)
    np.save(tmp_path / "features.npy", draw.random((RECORDS, WIDTH), dtype=np.float32))
    features = np.load(tmp_path / "features.npy", mmap_mode="r")
    return MadeUp(features, draw.integers(0, 2, RECORDS))


def answer(records: MadeUp, sampling: FullBatch | Poisson, compute: ComputeConfig) -> torch.Tensor:
    point = torch.full((MODEL.parameter_count,), 0.1)
    asked = barrier(records, MODEL, compute=compute)
    return asked.gradient(point, sampling=sampling, clipping=L2(1.0), noise=Gaussian(1.0), divisor=1.0)


def resident(path: str) -> int:
    """Kilobytes of a mapped file that lie in this process's memory."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    starts = [place for place, line in enumerate(lines) if line.endswith(path)]
    return sum(
        int(next(line for line in lines[start:] if line.startswith("Rss:")).split()[1]) for start in starts
    )


@pytest.mark.parametrize("sampling", [FullBatch(), Poisson(0.3)])
def test_the_answers_are_those_of_records_in_memory(mapped: MadeUp, sampling: FullBatch | Poisson) -> None:
    copied = MadeUp(np.array(mapped.features), mapped.labels)
    found = answer(mapped, sampling, SMALL)
    assert torch.equal(found, answer(copied, sampling, SMALL))
    torch.testing.assert_close(found, answer(copied, sampling, ComputeConfig()), rtol=1e-5, atol=1e-2)


@pytest.mark.parametrize(("compute", "let_go"), [(SMALL, True), (ComputeConfig(), False)])
def test_the_pages_of_a_file_that_does_not_fit_the_memory_are_let_go(
    mapped: MadeUp, compute: ComputeConfig, let_go: bool
) -> None:
    whole = RECORDS * WIDTH * 4 / 1024
    assert float(np.asarray(mapped.features).sum()) > 0
    assert resident("/features.npy") > 0.9 * whole
    answer(mapped, Poisson(0.3), compute)
    share = resident("/features.npy") / whole
    assert share < 0.2 if let_go else share > 0.9


def test_what_was_changed_in_memory_of_a_mapped_file_stays_changed(tmp_path: Path) -> None:
    np.save(tmp_path / "features.npy", np.ones((RECORDS, WIDTH), np.float32))
    changed = np.load(tmp_path / "features.npy", mmap_mode="c")
    changed[:] = 0.0
    for _ in range(2):
        assert not SMALL.loader.read(changed, np.arange(RECORDS)).any()

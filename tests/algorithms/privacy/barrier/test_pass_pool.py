"""Passes on several cores at once: the same bits for any number of them, in the order of the passes."""

import os
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from algorithms.gradients import L2, split_passes
from algorithms.privacy.barrier import pass_pool
from algorithms.privacy.barrier.barrier import ComputeConfig
from algorithms.privacy.barrier.fixed_arithmetic import fixed_arithmetic
from algorithms.privacy.barrier.importance_sampling import LastNorms
from algorithms.privacy.barrier.record_loader import OnDevice, RecordArrays, load_ahead
from algorithms.privacy.barrier.unnoised_queries import UnnoisedQueries
from algorithms.privacy.mechanisms.noise import seeded_generator
from algorithms.privacy.mechanisms.release import Gaussian, NoNoise, gradient_release
from algorithms.privacy.mechanisms.sampling import Poisson
from tests.support.barriers import barrier
from tests.support.bench import made_up, small_model
from tests.support.waiting import HANG_SECONDS

MANY = ComputeConfig(memory_mb=64, physical_batch=32)
RECORDS = made_up(300)


def summed(compute: ComputeConfig, records: RecordArrays = RECORDS) -> Tensor:
    model = small_model("mlp")
    asked = barrier(records, model=model, compute=compute)
    point = model.initial_parameters()
    return asked.gradient(
        point, sampling=Poisson(0.9), clipping=L2(0.1), noise=NoNoise(), divisor=1.0
    ).double()


@pytest.mark.parametrize("workers", [2, 3])
def test_the_bits_of_a_sum_are_those_of_one_worker(workers: int) -> None:
    assert torch.equal(summed(replace(MANY, workers=workers)), alone := summed(replace(MANY, workers=1)))
    assert alone.norm() > 0


def test_passes_run_at_once_and_come_in_their_order() -> None:
    engine = MANY.engine(small_model(), RECORDS)
    together = threading.Barrier(2)

    def run(own: object, number: int) -> tuple[int, int]:
        together.wait(
            timeout=HANG_SECONDS
        )  # broken, and the test with it, where no other pass runs meanwhile
        return number, id(own)

    found = list(pass_pool.PassPool(engine, 2, lambda: fixed_arithmetic(MANY, engine)).map(run, range(6)))
    assert [number for number, _ in found] == [0, 1, 2, 3, 4, 5]
    assert len({own for _, own in found}) == 2  # each worker has modules of its own
    assert id(engine) not in {own for _, own in found}


def test_there_are_no_more_workers_than_fit_the_memory() -> None:
    engine = MANY.engine(small_model(), RECORDS)
    each = (engine.pass_bytes + 8 * 10**6) / 1e6
    assert [
        pass_pool.pass_pool(replace(MANY, memory_mb=mb, workers=4), engine, 10**6).workers
        for mb in (1, int(2.5 * each), 1000)
    ] == [1, 2, 4]


def test_records_on_a_device_are_those_of_the_arrays() -> None:
    """Here on the CPU; on a GPU they lie there as a whole where they fit."""
    rows = np.array([5, 1, 299])
    placed = OnDevice.of(RECORDS, torch.device("cpu"))
    for found, expected in zip(MANY.loader.load(placed, rows), MANY.loader.load(RECORDS, rows), strict=True):
        assert torch.equal(found, expected)
    assert torch.equal(summed(MANY, placed), summed(MANY))


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_a_sum_without_waits_is_the_same_sum(precision: torch.dtype) -> None:
    """As on an accelerator; a pass with a record that is not finite is taken again."""
    features = RECORDS.features.copy()
    features[7], features[100] = np.nan, 1e30
    queries = UnnoisedQueries(
        replace(RECORDS, features=features),
        replace(small_model("mlp"), precision=precision),
        MANY,
        LastNorms(),
    )
    point, stream = small_model("mlp").initial_parameters(), seeded_generator(0).stream(0)
    release = gradient_release(Poisson(0.9), L2(0.5), Gaussian(1.0), 1.0)
    found = queries._sum_on_device(point, L2(0.5), release, stream.later(0))
    expected = queries.clipped_sum(point, L2(0.5), release, stream)
    assert len(list(split_passes(np.arange(250), queries.engine.physical_batch))) > 2
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    nobody = replace(RECORDS, features=features[:0], labels=RECORDS.labels[:0])
    queries = UnnoisedQueries(nobody, small_model("mlp"), MANY, LastNorms())
    assert not queries._sum_on_device(point, L2(0.5), release, stream.later(0)).any()


def test_a_pass_is_read_while_the_one_before_is_computed() -> None:
    read = [threading.Event() for _ in range(3)]

    def load(rows: NDArray[np.intp]) -> tuple[Tensor, Tensor]:
        read[int(rows[0])].set()
        return MANY.loader.load(RECORDS, rows)

    passes = load_ahead(load, [np.array([number]) for number in range(3)])
    for number, records in enumerate(passes):
        assert torch.equal(records()[0], torch.from_numpy(RECORDS.features[number : number + 1]))
        assert number == 2 or read[number + 1].wait(timeout=HANG_SECONDS)


@pytest.mark.parametrize(
    ("quota", "threads", "expected"),
    [
        ("max 100000\n", None, 6),
        ("350000 100000\n", None, 3),
        ("50000 100000\n", None, 1),
        (None, "2", 2),
        (None, "0", 1),
    ],
)
def test_a_process_takes_the_cores_that_it_may(
    quota: str | None, threads: str | None, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    monkeypatch.setattr(pass_pool, "QUOTA_FILE", tmp_path / "cpu.max")
    if quota is not None:
        (tmp_path / "cpu.max").write_text(quota)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if threads is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
    assert pass_pool.cores() == expected

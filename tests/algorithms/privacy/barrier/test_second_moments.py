"""Second moments: the right sum, and never more of a record than its bound."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from algorithms.errors import QueryFailedError, RefusedError
from algorithms.gradients import L2
from algorithms.privacy.barrier.frozen_prefix import MappedRecords
from algorithms.privacy.barrier.statistics import as_matrix, as_vector, moment_sum, vector_length
from algorithms.privacy.mechanisms.release import Gaussian
from tests.support.barriers import Free, barrier
from tests.support.bench import made_up, with_record
from tests.support.refusals import refused_as


def records(count: int = 6, *, scale: float = 1.0, seed: int = 0) -> torch.Tensor:
    return scale * torch.randn(count, 4, 3, generator=torch.Generator().manual_seed(seed))


def test_a_matrix_is_a_vector_of_the_same_norm_and_back() -> None:
    matrix = records()[0].double().T @ records()[0].double()
    vector = as_vector(matrix)
    assert len(vector) == vector_length(3) == 6
    assert float(vector.norm()) == pytest.approx(float(torch.linalg.matrix_norm(matrix)), rel=1e-12)
    torch.testing.assert_close(as_matrix(vector, 3), matrix, rtol=1e-12, atol=0)


def test_small_records_are_summed_as_they_are() -> None:
    given = records(scale=0.1)
    expected = sum(record.double().T @ record.double() for record in given)
    torch.testing.assert_close(as_matrix(moment_sum(given, 10.0), 3), expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3, 1e18])
@pytest.mark.parametrize("bound", [0.25, 3.0])
def test_a_record_adds_at_most_its_bound(scale: float, bound: float) -> None:
    one = records(1, scale=scale)
    assert float(moment_sum(one, bound).norm()) <= bound
    flat = one[:, :1]  # of rank one, where the bound is reached
    reached = min(bound, float(flat.double().square().sum()))
    assert float(moment_sum(flat, bound).norm()) == pytest.approx(reached, rel=1e-9)


def test_a_record_that_is_not_finite_counts_as_zero() -> None:
    given = records()
    spoilt = torch.cat([given, torch.full((1, 4, 3), math.nan), torch.full((1, 4, 3), math.inf)])
    torch.testing.assert_close(moment_sum(spoilt, 2.0), moment_sum(given, 2.0), rtol=1e-12, atol=0)


@pytest.mark.parametrize("statistic", [lambda f, y: f.sum(), lambda f, y: f, lambda f, y: f[0, :, :, None]])
def test_moments_of_what_is_no_matrix_are_refused_before_the_charge(statistic: Any) -> None:
    privacy_filter = Free()
    with pytest.raises(RefusedError, match="matrix of each record"):
        barrier(made_up(), privacy_filter=privacy_filter).moment(
            statistic, bound=L2(1.0), noise=Gaussian(1.0)
        )
    assert privacy_filter.events == []


def test_a_statistic_that_cannot_be_taken_of_records_at_once_fails_before_the_charge() -> None:
    """Else only an empty sample would get an answer."""
    privacy_filter = Free()
    with pytest.raises(RuntimeError):
        barrier(made_up(), privacy_filter=privacy_filter).total(
            lambda f, y: f.sum() if f.sum() > 0 else -f.sum(), bound=L2(1.0), noise=Gaussian(1.0)
        )
    assert privacy_filter.events == []


def test_a_record_of_which_a_statistic_cannot_be_taken_counts_as_zero() -> None:
    table, quiet = torch.eye(3), Gaussian(1e-6)
    usual = made_up(5)
    odd = with_record(usual, usual.features[0], 7)
    for ask in (
        lambda asked: asked.total(lambda f, y: table[y], bound=L2(1.0), noise=quiet),
        lambda asked: asked.moment(lambda f, y: table[y][None], bound=L2(1.0), noise=quiet),
    ):
        torch.testing.assert_close(ask(barrier(odd)), ask(barrier(usual)), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
    ],
)
def test_memory_that_lacks_leaves_no_record_out(error: Exception) -> None:
    """As it lacks because of the others in the pass; the answer fails as a whole."""
    asked = barrier(made_up(5))
    table, calls = torch.eye(3), [0]

    def statistic(features: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        if calls[0] > 1:  # the first call asks for the shape
            raise error
        return table[label]

    with refused_as("answer_short_of_memory", QueryFailedError):
        asked.total(statistic, bound=L2(1.0), noise=Gaussian(1e-6))


def test_a_record_of_which_a_statistic_cannot_be_taken_changes_no_other() -> None:
    """A sign at a kink, where a last bit decides: taken alone, the others would turn with it."""
    draw = torch.Generator().manual_seed(0)
    weights, table = torch.randn(4, 16, generator=draw), torch.eye(2)

    def statistic(features: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return torch.where(torch.nn.functional.linear(features, weights) > 0, 1.0, -1.0) * table[label].sum()

    points = torch.randn(20, 16, generator=draw).double()
    at_kink = points - points @ weights.double().T @ torch.linalg.pinv(weights.double()).T
    for one in 10.0 * at_kink.float():
        features = one.expand(51, 16).numpy()
        usual = MappedRecords(features[:50], np.zeros(50, np.int64))
        odd = MappedRecords(features, np.append(np.zeros(50, np.int64), 7))
        sums = [
            barrier(records).total(statistic, bound=L2(2.0), noise=Gaussian(1e-6)) for records in (usual, odd)
        ]
        torch.testing.assert_close(*sums, rtol=0, atol=1e-3)

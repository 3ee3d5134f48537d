"""Second moments: the right sum, and never more of a record than its bound."""

import math

import pytest
import torch

from algorithms.privacy.moments import as_matrix, as_vector, dimension, moment_sum


def records(count: int = 6, *, scale: float = 1.0, seed: int = 0) -> torch.Tensor:
    return scale * torch.randn(count, 4, 3, generator=torch.Generator().manual_seed(seed))


def test_a_matrix_is_a_vector_of_the_same_norm_and_back() -> None:
    matrix = records()[0].double().T @ records()[0].double()
    vector = as_vector(matrix)
    assert len(vector) == dimension(3) == 6
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

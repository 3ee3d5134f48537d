"""The division of noise over iterations, stages and the error bound: golden values, direct sums and optimality."""

import math

import numpy as np
import pytest

from algorithms.methods.momentum import (
    Array,
    Curve,
    Stage,
    coefficients,
    cut,
    divide_epsilon,
    error_bounds,
    growing_stages,
    laplace_scale,
)
from algorithms.privacy.accounting.epsilon import in_levels

CURVE = Curve(smoothness=5.0, strong_convexity=0.02)
FIVE = [Stage(5, 0.2)]
ONES = np.ones(5)

# Computed independently of this project, for T = 5, mu = .02, L = 5, a = .2, S_1 = 40, n = 100,000, epsilon = 1.
A = [0.3080087433341, 0.3288041432708, 0.3510035574373, 0.3747017787187, 0.4]
EPSILONS = [0.1913849930592, 0.1955986980123, 0.1999051757014, 0.2043064686949, 0.2088046645321]
SCALES = [0.002090028029921, 0.002045003387368, 0.002000948692781, 0.001957843050958, 0.001915666016831]
BOUND = 7.21335460057625  # from a potential of 10, d = 20
SCALES_OF_SAMPLES = [0.01304280337662, 0.01288952886994, 0.01273840521392, 0.01258937881536, 0.0124423968427]
SCALES_OF_SAMPLES_AS_PRINTED = [
    0.01292306596221,
    0.01282823603098,
    0.01273449768544,
    0.01264183061994,
    0.01255021491263,
]


def test_coefficients_are_the_reference_values() -> None:
    np.testing.assert_allclose(coefficients(FIVE, CURVE), A, rtol=1e-12)


def test_the_closed_form_division_is_the_reference() -> None:
    epsilons = divide_epsilon(1.0, np.array(A), ONES)
    np.testing.assert_allclose(epsilons, EPSILONS, rtol=1e-12)
    np.testing.assert_allclose(40 / 1e5 * laplace_scale(epsilons), SCALES, rtol=1e-12)


def test_the_division_for_samples_is_the_reference() -> None:
    epsilons = divide_epsilon(1.0, np.array(A), ONES, rate=0.01)
    np.testing.assert_allclose(40 / 1000 * laplace_scale(epsilons, rate=0.01), SCALES_OF_SAMPLES, rtol=1e-5)
    as_printed = laplace_scale(np.array(EPSILONS), rate=0.01)
    np.testing.assert_allclose(40 / 1000 * as_printed, SCALES_OF_SAMPLES_AS_PRINTED, rtol=1e-10)


@pytest.mark.parametrize(("size", "scale"), [(100_000, 0.040000000000000424), (1000, 0.05749998180027885)])
def test_equal_scales_are_the_reference_values(size: int, scale: float) -> None:
    epsilons = divide_epsilon(1.0, np.ones(1), np.array([100]), rate=size / 100_000)
    assert 40 / size * laplace_scale(epsilons, rate=size / 100_000) == pytest.approx(scale, rel=1e-12)


def test_the_bound_is_the_reference() -> None:
    bounds = error_bounds(FIVE, CURVE, gap=5.0, noise=20 * (40 / 1e5) ** 2)  # a gap of 5 is a potential of 10
    assert bounds[-1] == pytest.approx(BOUND, rel=1e-12)


@pytest.mark.parametrize(
    ("condition_number", "lengths"), [(20.0, [14, 40, 80, 160, 320]), (255.0, [89, 136])]
)
def test_stages_grow_as_published(condition_number: float, lengths: list[int]) -> None:
    stages = growing_stages(sum(lengths), 0.5, condition_number)
    assert [stage.steps for stage in stages] == lengths
    assert [stage.step_size for stage in stages] == [0.5, *(0.5 / 4.0**k for k in range(2, len(lengths) + 1))]
    assert [stage.steps for stage in growing_stages(10_000, 1.0, 500.0)][1:5] == [188, 376, 752, 1504]


def test_a_cut_ends_in_the_middle_of_a_stage() -> None:
    stages = [Stage(3, 1.0), Stage(4, 0.5), Stage(5, 0.25)]
    assert cut(stages, 5) == [Stage(3, 1.0), Stage(2, 0.5)]
    assert cut(stages, 3) == [Stage(3, 1.0)]
    assert cut(stages, 100) == stages


@pytest.mark.parametrize(
    ("step", "in_stages", "as_printed", "in_the_code"),
    [(1.0, False, 121, 136), (0.1, False, 349, 396), (1.0, True, 89, 89), (0.1, True, 89, 89)],
)
def test_iterations_are_chosen_as_published(
    step: float, in_stages: bool, as_printed: int, in_the_code: int
) -> None:
    curve, size = Curve(5.1, 0.02), step / 5.1
    stages = growing_stages(1000, size, curve.condition_number) if in_stages else [Stage(1000, size)]
    noise = 20 * (40 / 1e5) ** 2
    chosen = [
        int(np.argmin(error_bounds(stages, curve, gap=10.0, noise=noise / divisor))) + 1 for divisor in (1, 2)
    ]
    assert chosen == [as_printed, in_the_code]


@pytest.mark.parametrize("power", [1 / 3, 1 / 2])
def test_the_bound_after_each_iteration_is_the_sum_it_stands_for(power: float) -> None:
    stages = [Stage(4, 0.2), Stage(3, 0.05), Stage(6, 0.01)]
    bounds = error_bounds(stages, CURVE, gap=3.0, noise=0.7, power=power)
    for length in range(1, 14):
        kept = cut(stages, length)
        shrunk = math.prod((1 - math.sqrt(0.02 * s.step_size)) ** s.steps for s in kept)
        noise = 0.7 * np.sum(coefficients(kept, CURVE) ** power) ** (1 / power)
        assert bounds[length - 1] == pytest.approx(2.0 ** len(kept) * 3.0 * shrunk + noise, rel=1e-12)


@pytest.mark.parametrize("eigenvalue", [0.02, 0.3, 5.0])
def test_noise_adds_no_more_to_a_quadratic_than_its_coefficient_says(eigenvalue: float) -> None:
    stages = [Stage(30, 0.2), Stage(40, 0.05)]
    allowed = coefficients(stages, CURVE)
    plan = [(s.step_size, index) for index, s in enumerate(stages) for _ in range(s.steps)]
    added = [_error_by_noise_of(t, plan, eigenvalue) for t in range(len(plan))]
    assert (np.array(added) <= allowed).all()
    assert max(np.array(added) / allowed) > 0.01


def _error_by_noise_of(disturbed: int, plan: list[tuple[float, int]], eigenvalue: float) -> float:
    """The error after the last iteration by noise of scale 1 (variance 2) in one of them alone."""
    now, before, stage = 0.0, 0.0, 0
    for t, (size, index) in enumerate(plan):
        before, stage = (now, index) if index != stage else (before, stage)
        ahead = now + CURVE.momentum(size) * (now - before)
        now, before = ahead - size * (eigenvalue * ahead + (t == disturbed)), now
    return eigenvalue / 2 * 2 * now**2


@pytest.mark.parametrize("rate", [1.0, 0.5, 0.01])
def test_no_shift_of_epsilon_between_iterations_lowers_the_noise(rate: float) -> None:
    values, counts = np.array([1e-3, 0.02, 0.4]), np.array([7, 2, 30])
    epsilons = divide_epsilon(2.0, values, counts, rate=rate)
    assert np.sum(counts * epsilons) == pytest.approx(2.0, rel=1e-12)

    def noise(divided: Array) -> float:
        return float(np.sum(counts * values * laplace_scale(divided, rate=rate) ** 2))

    for giving, taking in [(0, 1), (1, 0), (0, 2), (2, 0), (1, 2), (2, 1)]:
        shifted, amount = epsilons.copy(), 0.01 * epsilons[giving]
        shifted[giving] -= amount
        shifted[taking] += amount * counts[giving] / counts[taking]
        assert noise(shifted) > noise(epsilons)


def test_a_sample_of_nearly_all_records_divides_as_all_do() -> None:
    nearly = divide_epsilon(1.0, np.array(A), ONES, rate=1 - 1e-9)
    np.testing.assert_allclose(nearly, EPSILONS, rtol=1e-7)


@pytest.mark.parametrize("epsilon", [1e-4, 1.0, 50.0])
def test_the_division_for_samples_is_found_for_small_and_large_budgets(epsilon: float) -> None:
    epsilons = divide_epsilon(epsilon, np.geomspace(1e-8, 1.0, 20), np.full(20, 5), rate=1e-3)
    assert (np.diff(epsilons) > 0).all()
    assert 5 * np.sum(epsilons) == pytest.approx(epsilon, rel=1e-12)


@pytest.mark.parametrize("stages", [[Stage(300, 0.2)], growing_stages(1500, 0.2, 250.0)])
def test_grouping_keeps_the_iterations_and_almost_all_of_the_gain(stages: list[Stage]) -> None:
    exact = coefficients(stages, CURVE)
    values, counts = in_levels(exact, 24)
    assert counts.sum() == len(exact)
    assert len(np.unique(values)) <= 24
    best = np.sum(np.cbrt(exact)) ** 3
    rough = np.repeat(divide_epsilon(1.0, values, counts), counts)
    assert best <= np.sum(exact / rough**2) <= 1.02 * best
    values, counts = in_levels(np.full(7, 0.25), 24)  # equal ones are one group
    assert (values.tolist(), counts.tolist()) == ([pytest.approx(0.25, rel=1e-6)], [7])

"""Reference values of the accountants, computed independently with dp-accounting, numpy and scipy (golden.json).

Those of correlated noise, which other tests use, are by jax_privacy 2.0.0.
"""

import math
from typing import Any

import dp_accounting as dp
import numpy as np
import pytest

from algorithms.privacy.accounting import Budget
from algorithms.privacy.accounting.epsilon import epsilon, epsilon_of_rdp, rdp
from algorithms.privacy.accounting.events import Schedule
from algorithms.privacy.accounting.filters import conversion, epsilon_of_zcdp, rho_of_budget
from algorithms.privacy.accounting.noise_search import LEVELS, calibrate, in_levels
from algorithms.privacy.mechanisms.release import Gumbel, Laplace, argmin_release
from tests.algorithms.privacy.accounting.golden_values import GOLDEN, golden_value

REPLACE_ONE = dp.NeighboringRelation.REPLACE_ONE


def named(*prefixes: str, suffix: str = "") -> list[str]:
    return [name for name in GOLDEN if name.startswith(prefixes) and name.endswith(suffix)]


def params(name: str) -> dict[str, Any]:
    return dict(GOLDEN[name]["params"])


def sampled(q: float, z: float) -> dp.DpEvent:
    return dp.PoissonSampledDpEvent(q, dp.GaussianDpEvent(z))


@pytest.mark.parametrize(
    "name", named("psg", "adp_dpsgd", suffix="_rdp") + named("psg", "adp_dpsgd", suffix="_pld")
)
def test_poisson_sampled_gaussian(name: str) -> None:
    p = params(name)
    accountant = name.rpartition("_")[2]
    assert epsilon([(sampled(p["q"], p["z"]), p["T"])], p["delta"], accountant=accountant) == golden_value(
        name
    )


@pytest.mark.parametrize("name", named("gdp"))
def test_one_gaussian_is_exact_by_pld(name: str) -> None:
    p = params(name)
    spent = epsilon([(dp.GaussianDpEvent(1 / p["mu"]), 1)], p["delta"])
    assert GOLDEN[name]["value"] <= spent <= GOLDEN[name]["value"] * (1 + 1e-5)


def test_both_accountants_mean_the_same_multiplier_under_replace_one() -> None:
    gaussian = [(dp.GaussianDpEvent(4.0), 1)]
    assert epsilon(gaussian, 1e-5, adjacency=REPLACE_ONE) == golden_value("trap_replace_pld")
    halved = [(dp.GaussianDpEvent(8.0), 1)]  # the reference was computed without halving the multiplier
    assert epsilon(halved, 1e-5, accountant="rdp", adjacency=REPLACE_ONE) == golden_value("trap_replace_rdp")


def test_sampling_without_replacement_under_replace_one() -> None:
    p = params("wor_50000_256")
    event = dp.SampledWithoutReplacementDpEvent(p["n"], p["m"], dp.GaussianDpEvent(p["std_over_C"]))
    spent = epsilon([(event, p["T"])], p["delta"], accountant="rdp", adjacency=REPLACE_ONE)
    assert spent == golden_value("wor_50000_256")


@pytest.mark.parametrize("name", named("zcdp_tight"))
def test_rho_of_a_budget(name: str) -> None:
    p = params(name)
    rho = rho_of_budget(Budget(p["eps"], p["delta"]))
    assert rho == golden_value(name)
    assert epsilon_of_zcdp(rho, p["delta"]) <= p["eps"]
    assert rho > GOLDEN[name.replace("tight", "bs")]["value"]


@pytest.mark.parametrize(("name", "noise"), [("agd_gumbel_scale", Gumbel), ("agd_laplace_scale", Laplace)])
def test_scale_of_a_noisy_selection(name: str, noise: type) -> None:
    p = params(name)
    release = argmin_release(p["C"], noise(GOLDEN[name]["value"] / p["C"]))
    assert release.event().rho == pytest.approx(p["rho"], rel=1e-9)
    assert release.noise_scale == golden_value(name)


@pytest.mark.parametrize("name", named("dpis_lemma"))
def test_one_importance_sampled_step(name: str) -> None:
    p = params(name)
    event = sampled(p["b"] * p["C"] / p["K_tilde"], p["sigma_G"] * p["C"] * p["N_tilde"] / p["K_tilde"])
    assert rdp([(event, 1)], orders=(float(p["alpha"]),))[0] == golden_value(name)


def importance_sampled_run() -> Schedule:
    p = params("dpis_run_rdp")
    schedule = [(dp.GaussianDpEvent(p["sigma_N"]), 1), (dp.GaussianDpEvent(p["sigma_K"]), 2 * p["E"])]
    for epoch in range(p["E"]):
        k = max(60000 * 0.95**epoch, p["k"] * p["b"] * p["C"])
        rate, multiplier = p["b"] * p["C"] / k, p["sigma_G"] * p["C"] * p["N_tilde"] / k
        schedule.append((sampled(rate, multiplier), p["T"]))
    return schedule


def test_an_importance_sampled_run_by_both_accountants() -> None:
    schedule = importance_sampled_run()
    assert epsilon(schedule, 1e-5, accountant="rdp") == golden_value("dpis_run_rdp")
    assert epsilon(schedule, 1e-5, discretisation=1e-3) == golden_value("dpis_run_pld")


@pytest.mark.parametrize("order", [3, 5])
def test_an_importance_sampled_run_at_one_order(order: int) -> None:
    total = rdp(importance_sampled_run(), orders=(float(order),))[0]
    assert total == golden_value(f"dpis_run_alpha{order}")
    assert total + conversion(order, 1e-5) == golden_value(f"dpis_run_eps_alpha{order}")


def test_a_subsampled_and_rescaled_sum_costs_what_the_full_sum_costs() -> None:
    p = params("dpis_K_eq11_true")
    orders = (float(p["alpha"]),)
    claimed = rdp([(sampled(p["p_K"], p["sigma_K"]), 1)], orders=orders)[0]
    true = rdp([(sampled(p["p_K"], p["sigma_K"] * p["p_K"]), 1)], orders=orders)[0]
    full = rdp([(dp.GaussianDpEvent(p["sigma_K"]), 1)], orders=orders)[0]
    assert claimed == golden_value("dpis_K_claimed_eq19")
    assert true == golden_value("dpis_K_eq11_true")
    assert full == golden_value("dpis_K_fullsum_true")


@pytest.mark.parametrize("name", named("dpis_sigma"))
def test_calibration_by_rdp(name: str) -> None:
    p = params(name)

    def schedule_at(sigma: float) -> Schedule:
        return [(sampled(p["b"] / (p["N"] * p["r"]), sigma / p["r"]), p["T"])]

    found = calibrate(schedule_at, Budget(4.0, p["delta"]), accountant="rdp")
    assert found == golden_value(name)
    assert epsilon(schedule_at(found), p["delta"], accountant="rdp") <= 4.0


def decaying(sigma: float, steps: int = 11700, exact: int = 60, groups: int = 600) -> Schedule:
    """Steps 1/sqrt(20 + t) with matched noise; all but the first are grouped at their smallest multiplier."""
    multipliers = [sigma * (20 + t) ** 0.25 * 256 for t in range(steps)]
    size = math.ceil((steps - exact) / groups)
    later = [(z, min(size, steps - i)) for i, z in list(enumerate(multipliers))[exact::size]]
    return [(sampled(256 / 50000, z), count) for z, count in [(z, 1) for z in multipliers[:exact]] + later]


def by_orders(schedule: Schedule, orders: tuple[float, ...]) -> float:
    """Epsilon by the best of some orders: of 642 events, all orders take long."""
    return epsilon_of_rdp(rdp(schedule, orders=orders), 1e-5, orders)


@pytest.mark.parametrize(
    ("epsilon_bar", "near"),
    [("0.8", (62.0, 63.0, 128.0)), ("1.6", (21.0, 22.0, 23.0)), ("6.4", (2.1, 2.2, 2.3))],
)
def test_noise_matched_to_decaying_steps(epsilon_bar: str, near: tuple[float, ...]) -> None:
    sigma = GOLDEN[f"adp_sched_{epsilon_bar}_sigma"]["value"]
    assert by_orders(decaying(sigma), near) == golden_value(f"adp_sched_{epsilon_bar}_rdp")


def in_planned_levels(sigma: float, levels: int = LEVELS) -> Schedule:
    """The same steps with as few different multipliers as a plan of ADP-SGD has."""
    values, counts = in_levels((20.0 + np.arange(11700)) ** 0.25, levels)
    return [
        (sampled(256 / 50000, 256 * sigma * float(value)), int(count))
        for value, count in zip(values, counts, strict=True)
    ]


# At multipliers from 0.36 on, the first steps count for more than the mean of their level, so it takes finer ones.
# So large an epsilon is the same on a coarse grid, which is ten times as fast.
@pytest.mark.parametrize(
    ("epsilon_bar", "levels", "grid"),
    [("0.8", LEVELS, None), ("1.6", LEVELS, None), ("6.4", 2 * LEVELS, 1e-3)],
)
def test_noise_in_levels_costs_what_noise_matched_to_each_step_costs(
    epsilon_bar: str, levels: int, grid: float | None
) -> None:
    schedule = in_planned_levels(GOLDEN[f"adp_sched_{epsilon_bar}_sigma"]["value"], levels)
    spent = epsilon(schedule, 1e-5, discretisation=grid)
    low, high = GOLDEN[f"adp_sched_{epsilon_bar}_pld_bracket"]["value"]
    assert low * 0.995 <= spent <= high * 1.005


def test_matched_noise_at_the_epsilon_of_constant_noise() -> None:
    schedule = decaying(GOLDEN["adp_match_1.6"]["value"])
    spent = by_orders(schedule, (26.0, 27.0, 28.0))
    assert spent == pytest.approx(params("adp_match_1.6")["target_eps"], rel=0.02)


def test_a_short_schedule_of_growing_noise() -> None:
    schedule = [(sampled(0.05, 1.2 * ((20 + t) / 20) ** 0.25), 1) for t in range(5)]
    assert epsilon(schedule, 1e-5, accountant="rdp") == golden_value("adp_small_T5_rdp")
    assert epsilon(schedule, 1e-5) == golden_value("adp_small_T5_pld")


def test_laplace_by_both_accountants() -> None:
    schedule = [(dp.LaplaceDpEvent(100.0), 100)]
    assert epsilon(schedule, 1e-5, accountant="rdp") == golden_value("lap_rdp_full")
    assert epsilon(schedule, 1e-5) == golden_value("lap_pld_100000_100")


@pytest.mark.parametrize(("name", "mean", "shape"), [("select_6_1", 6, 1.0), ("select_36_0.5", 36, 0.5)])
def test_the_best_of_a_random_number_of_runs(name: str, mean: float, shape: float) -> None:
    base = params("psg00_rdp")
    run = dp.SelfComposedDpEvent(sampled(base["q"], base["z"]), base["T"])
    event = dp.dp_event.RepeatAndSelectDpEvent(run, mean, shape)
    assert epsilon_of_rdp(rdp([(event, 1)]), 1e-5) == golden_value(name)

"""What DP-AGD may spend and how an iteration spends it: Gaussian measurements of a gradient, selections of a step."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass

import dp_accounting as dp
from scipy.optimize import brentq
from torch import Tensor

from algorithms.algorithm import Plan, Target
from algorithms.planning import plan_renyi, plan_zcdp
from algorithms.privacy.budget import Budget
from algorithms.privacy.errors import Refused
from algorithms.privacy.filters import conversion, rho_of_budget
from algorithms.privacy.releases import (
    Gumbel,
    Poisson,
    argmin_release,
)
from algorithms.privacy.renyi import rdp
from algorithms.public import Public

_SLACK = 1e-9
"""Part of a budget that is left over, so that what is spent of it does not round above it."""

_ORDERS = (*range(2, 33), *range(36, 65, 4), *range(80, 129, 16), 192, 256, 384, 512, 768, 1024)
_MULTIPLIERS = (1e-2, 1e9)


@dataclass(frozen=True)
class Iteration:
    """gradient_rho: of the first measurement, before sampling. selection_multiplier: of the selection's noise."""

    gradient_rho: float
    selection_multiplier: float


@dataclass(frozen=True)
class Measured:
    """A noised sum of clipped gradients, [d]; its noise has the variance clip_norm^2 / (2 rho)."""

    total: Tensor
    rho: float

    def averaged(self, other: "Measured") -> "Measured":
        """Both by their inverse variances, which add up."""
        rho = self.rho + other.rho
        return Measured((self.rho * self.total + other.rho * other.total) / rho, rho)


def plan_papers(splits: int, target: Target, public: Public) -> Plan:
    """The paper's: epsilon / (2 splits) for a measurement, by the Gaussian mechanism's formula, and for a selection.

    With Laplace noise in the selection, and rho = (sqrt(L + epsilon) - sqrt(L))^2 for L = ln(1 / delta) in all (Lee and
    Kifer 2018, Section 5; that the formula is taken at the whole delta is known from the released code).
    """
    epsilon, delta = _finite(target.budget)
    part, log_delta = epsilon / (2 * splits), math.log(1 / delta)
    rho = (math.sqrt(log_delta + epsilon) - math.sqrt(log_delta)) ** 2
    spent = Iteration(part**2 / (4 * math.log(1.25 / delta)), 1 / part)
    return _plan(rho, spent, spent.gradient_rho + part**2 / 2, target, public)


def plan_even(iterations: int, share: float, target: Target, public: Public) -> Plan:
    """The whole rho of (epsilon, delta), cut into equal parts; `share` of each is for a selection with Gumbel noise."""
    rho = rho_of_budget(target.budget)
    each = rho * (1 - _SLACK) / iterations
    spent = Iteration((1 - share) * each, 1 / math.sqrt(8 * share * each))
    return _plan(rho, spent, each, target, public)


def plan_sampled(iterations: int, share: float, rate: float, target: Target, public: Public) -> Plan:
    """The same cuts of a Rényi budget, for Poisson samples; at the order that leaves the gradient the least noise.

    The order follows from public values and is fixed with the plan, as a filter needs it.
    """
    epsilon, delta = _finite(target.budget)
    limits = {order: epsilon - conversion(order, delta) for order in _ORDERS}

    def gradient(multiplier: float) -> dp.DpEvent:
        return dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(multiplier))

    def selection(multiplier: float) -> dp.DpEvent:
        return argmin_release(1.0, Gumbel(multiplier), Poisson(rate)).event()

    def least(event: Callable[[float], dp.DpEvent], order: int, part: float) -> float:
        return _least_multiplier(event, order, part * (1 - _SLACK) * limits[order] / iterations)

    usable = [order for order, limit in limits.items() if limit > 0]
    if not usable:
        raise Refused(
            f"epsilon {epsilon:g} at delta {delta:g} is too small for a sampled run; raise one of them."
        )
    order = min(usable, key=lambda order: least(gradient, order, 1 - share))
    spent = Iteration(0.5 / least(gradient, order, 1 - share) ** 2, least(selection, order, share))
    return plan_renyi(
        order, target=target, public=public, steps=iterations, sampling_rate=rate, own=asdict(spent)
    )


def _plan(rho: float, spent: Iteration, cost: float, target: Target, public: Public) -> Plan:
    """Under a zCDP filter, for as many iterations as `rho` holds without a rejection."""
    if cost > rho:
        raise Refused("an iteration would cost more than the whole budget; set algorithm.iterations higher.")
    return plan_zcdp(rho, target=target, public=public, steps=math.floor(rho / cost), own=asdict(spent))


def _least_multiplier(event: Callable[[float], dp.DpEvent], order: int, limit: float) -> float:
    """The least noise multiplier whose event costs at most `limit` at a Rényi order."""

    def excess(logarithm: float) -> float:
        cost = float(rdp([(event(math.exp(logarithm)), 1)], orders=(float(order),))[0])
        return math.log(min(max(cost, 1e-300), 1e300) / limit)

    low, high = (math.log(multiplier) for multiplier in _MULTIPLIERS)
    if excess(low) <= 0:
        return _MULTIPLIERS[0]
    return math.exp(brentq(excess, low, high, xtol=1e-10) + _SLACK)


def _finite(budget: Budget) -> tuple[float, float]:
    if not 0 < budget.epsilon < math.inf or not 0 < budget.delta < 1:
        raise Refused(
            f"{budget} gives no budget to spend; give a finite epsilon above 0 and delta in (0, 1)."
        )
    return budget.epsilon, budget.delta

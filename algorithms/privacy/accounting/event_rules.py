"""What each privacy event is worth: one rule per class of events, which the accountants and filters ask.

A new mechanism's event brings its rule with it by `register`; nothing else matches classes of events.
"""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import attrs
import dp_accounting as dp
import numpy as np
from dp_accounting.pld import PLDAccountant, pld_pmf, privacy_loss_mechanism
from dp_accounting.pld import privacy_loss_distribution as distributions
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from dp_accounting.rdp import RdpAccountant
from dp_accounting.rdp.rdp_privacy_accountant import (
    DEFAULT_RDP_ORDERS,
    _compute_rdp_repeat_and_select,
    _gamma_truncated_negative_binomial,
)
from scipy.special import expit, log_ndtr
from scipy.stats import norm

from algorithms.errors import RefusedError

Relation: TypeAlias = dp.NeighboringRelation
Orders: TypeAlias = tuple[float, ...]
_ADD_OR_REMOVE_ONE = dp.NeighboringRelation.ADD_OR_REMOVE_ONE
_REPLACE_ONE = dp.NeighboringRelation.REPLACE_ONE
_ROUNDING, _NEAR_ZERO, _NEAR_NOTHING = 2e-15, 1e-10, 1e-9
_TAIL = 12.0
_TAIL_DELTA, _CORNERS, _LARGEST_STEP, _LARGEST_LOSS = 1e-13, 4000, 10.0, 500.0


@attrs.frozen
class PureDpEvent(dp.DpEvent):  # type: ignore[misc]
    """A mechanism of pure differential privacy, of which nothing but its epsilon under add-or-remove-one is used."""

    epsilon: float


@attrs.frozen
class ObjectivePerturbationDpEvent(dp.DpEvent):  # type: ignore[misc]
    """The exact minimum of a convex objective with a random linear term, for a linear model with one output.

    noise_multiplier: standard deviation of the term over the bound of a record's gradient. curvature_ratio: bound of
    a record's curvature over the strong convexity of the objective. See Redberg, Koskela and Wang 2023.
    """

    noise_multiplier: float
    curvature_ratio: float


@attrs.frozen
class RenyiDpEvent(dp.DpEvent):  # type: ignore[misc]
    """A mechanism of which nothing but its Rényi divergence at one order is known, under add-or-remove-one.

    order: above 1. bound: the divergence there. The releases of a run under a Rényi filter are one such event.
    """

    order: float
    bound: float


@attrs.frozen
class EitherDpEvent(dp.DpEvent):  # type: ignore[misc]
    """One of several mechanisms, chosen without a look at the records, as a trial of a search takes its settings.

    events: of which the worst counts at each Rényi order, since a mixture diverges at most as its worst part does.
    """

    events: list[dp.DpEvent]


@dataclass(frozen=True)
class Traced:
    """What the row of a release with a given event can say in a noise trace.

    sampling: the names of the samples that it can be of. rate: how likely a record takes part. multipliers: the noise
    multiplier, by the name of each noise that has this event; none for an event of no release.
    """

    multipliers: Mapping[str, float]
    sampling: tuple[str, ...] = ("full batch",)
    rate: float = 1.0


class EventRule:
    """What an event is worth. What a rule does not say is refused, or left to dp_accounting's accountants."""

    def is_possible(self, event: Any) -> bool:
        """Whether the numbers of the event, not those of its parts, lie where its theorems hold."""
        return True

    def is_proven(self, event: Any, adjacency: Relation) -> bool:
        """Whether any theorem covers the event, not its parts, under an adjacency."""
        return True

    def is_not_private(self, event: Any) -> bool:
        """Whether the event, or one that it is made of, protects nobody."""
        return any(rule_of(part).is_not_private(part) for part in parts(event))

    def to_json(self, event: Any) -> dict[str, Any]:
        """The event's fields under their own names."""
        fields: tuple[Any, ...] = attrs.fields(type(event))
        return {field.name: _value_to_json(getattr(event, field.name)) for field in fields}

    def from_json(self, kind: type[dp.DpEvent], document: Mapping[str, Any]) -> dp.DpEvent:
        """The event of a class that `to_json` wrote; raises RefusedError for other fields than the class has."""
        expected = {field.name for field in attrs.fields(kind)}
        if set(document) != expected:
            raise RefusedError(
                f"a {kind.__name__} has the fields {sorted(expected)}, not {sorted(document)}; check the document."
            )
        try:
            return kind(**{key: _value_from_json(document[key]) for key in expected})
        except TypeError:  # a number where numbers belong
            raise RefusedError(f"a field of the {kind.__name__} is no list; check the document.") from None

    def pure_epsilon(self, event: Any) -> float:
        """Its pure epsilon; raises RefusedError where it has none."""
        raise RefusedError(
            f"{event} is not purely private; use Laplace noise, or a delta above 0 with PLD or RDP."
        )

    def replacing(self, event: Any) -> dp.DpEvent:
        """What the event is under replace-one."""
        raise RefusedError(f"{event} has no bound under replace-one; keep to add-or-remove-one.")

    def traced(self, event: Any) -> Traced:
        """What the trace of a release with this event says."""
        return Traced({})

    def releases(self, event: Any) -> Iterator[tuple[dp.DpEvent, int]]:
        """The events that the accountants take in its place, and how often each."""
        yield event, 1

    def poisson_replacing(self, event: Any, rate: float) -> dp.DpEvent:
        """What a Poisson sample of the event is under replace-one."""
        raise RefusedError(
            f"a Poisson sample of {event} has no bound under replace-one; keep to add-or-remove-one."
        )

    def poisson_amplified(self, event: Any, rate: float) -> dp.DpEvent:
        """A Poisson sample of the event in a form that the accountants have."""
        return dp.PoissonSampledDpEvent(rate, event)

    def poisson_rdp(self, event: Any, rate: float, orders: Orders) -> np.ndarray | None:
        """The Rényi bounds of a Poisson sample, shape [orders]; None leaves them to dp_accounting."""
        return None

    def sample_replacing(self, event: Any, records: int, size: int) -> dp.DpEvent:
        """What a sample of `size` of `records` without replacement is under replace-one."""
        inner = self.replacing(event)
        return PureDpEvent(_of_sample(size / records, rule_of(inner).pure_epsilon(inner)))

    def amplified(self, event: Any) -> dp.DpEvent:
        """The event with its samples' gain worked out where the accountants have no form for it."""
        return event

    def pld(self, event: Any, count: int, grid: float, adjacency: Relation) -> PrivacyLossDistribution:
        """The privacy loss of `count` times the event."""
        return _by_pld(event, count, grid, _ADD_OR_REMOVE_ONE)

    def rdp(self, event: Any, orders: Orders, adjacency: Relation) -> np.ndarray:
        """The Rényi bounds, shape [orders]."""
        return _by_rdp(event, orders, _ADD_OR_REMOVE_ONE)

    def rho(self, event: Any) -> float:
        """The rho of the event under zCDP."""
        raise RefusedError(f"{event} has no proven zCDP bound; use a Rényi filter for it.")

    def unsampled(self, event: Any, adjacency: Relation) -> dp.DpEvent:
        """The event as if its samples had been taken of all records."""
        return event

    def poisson_grouped(self, event: Any, rate: float, count: int) -> dp.DpEvent:
        """What bounds a Poisson sample of the event when `count` records come or go together."""
        return EventRule.grouped(self, dp.PoissonSampledDpEvent(rate, event), count)

    def grouped(self, event: Any, count: int) -> dp.DpEvent:
        """An event whose loss bounds that of `event` when `count` records come or go together."""
        raise RefusedError(
            f"{event} has no bound for {count} records of one person; let the run read one block, or take another"
            " method."
        )


class _Nothing(EventRule):
    def pure_epsilon(self, event: Any) -> float:
        return 0.0

    def replacing(self, event: Any) -> dp.DpEvent:
        return event

    def rho(self, event: Any) -> float:
        return 0.0

    def grouped(self, event: Any, count: int) -> dp.DpEvent:
        return event


class _NotPrivate(EventRule):
    def is_not_private(self, event: Any) -> bool:
        return True

    def traced(self, event: Any) -> Traced:
        return Traced({"nonoise": 0.0}, ("full batch", "poisson", "importance", "without replacement"))

    def pure_epsilon(self, event: Any) -> float:
        return math.inf

    def replacing(self, event: Any) -> dp.DpEvent:
        return event

    def grouped(self, event: Any, count: int) -> dp.DpEvent:
        return event


class _Scaled(EventRule):
    """Noise whose scale is a multiple of the bound of a record; moved by k bounds it is as noise k times smaller.

    Gaussian noise of multiplier z has rho 1 / (2 z^2), and so has Laplace noise, of pure epsilon 1/z (Bun and Steinke
    2016, Propositions 1.6 and 1.4).
    """

    def is_possible(self, event: Any) -> bool:
        return bool(0 < event.noise_multiplier < math.inf)

    def replacing(self, event: Any) -> dp.DpEvent:
        return self.grouped(event, 2)

    def rho(self, event: Any) -> float:
        return float(0.5 / event.noise_multiplier**2)

    def grouped(self, event: Any, count: int) -> dp.DpEvent:
        return type(event)(event.noise_multiplier / count)

    def poisson_grouped(self, event: Any, rate: float, count: int) -> dp.DpEvent:
        return dp.PoissonSampledDpEvent(_any_of(count, rate), self.grouped(event, count))


class _Gaussian(_Scaled):
    def pld(self, event: Any, count: int, grid: float, adjacency: Relation) -> PrivacyLossDistribution:
        return _of_sampled_gaussian(event.noise_multiplier, 1.0, grid).self_compose(count)

    def traced(self, event: Any) -> Traced:
        return Traced({"gaussian": event.noise_multiplier})

    def poisson_replacing(self, event: Any, rate: float) -> dp.DpEvent:
        return dp.PoissonSampledDpEvent(rate, event)

    def sample_replacing(self, event: Any, records: int, size: int) -> dp.DpEvent:
        return dp.SampledWithoutReplacementDpEvent(records, size, self.replacing(event))


class _Laplace(_Scaled):
    def traced(self, event: Any) -> Traced:
        return Traced({"laplace": event.noise_multiplier})

    def poisson_rdp(self, event: Any, rate: float, orders: Orders) -> np.ndarray:
        return _rdp_of_pure(_of_sample(rate, self.pure_epsilon(event)), np.array(orders))

    def pure_epsilon(self, event: Any) -> float:
        return float(1.0 / event.noise_multiplier)


class _Pure(EventRule):
    def is_possible(self, event: Any) -> bool:
        return bool(event.epsilon >= 0)

    def pure_epsilon(self, event: Any) -> float:
        return float(event.epsilon)

    def replacing(self, event: Any) -> dp.DpEvent:
        return PureDpEvent(2 * event.epsilon)

    def pld(self, event: Any, count: int, grid: float, adjacency: Relation) -> PrivacyLossDistribution:
        return _of_pure(event.epsilon, grid).self_compose(count)

    def rdp(self, event: Any, orders: Orders, adjacency: Relation) -> np.ndarray:
        return _rdp_of_pure(event.epsilon, np.array(orders))

    def rho(self, event: Any) -> float:
        return float(0.5 * event.epsilon**2)

    def grouped(self, event: Any, count: int) -> dp.DpEvent:
        return PureDpEvent(count * event.epsilon)

    def poisson_grouped(self, event: Any, rate: float, count: int) -> dp.DpEvent:
        return dp.PoissonSampledDpEvent(_any_of(count, rate), self.grouped(event, count))

    def poisson_amplified(self, event: Any, rate: float) -> dp.DpEvent:
        return PureDpEvent(_of_sample(rate, event.epsilon))

    def traced(self, event: Any) -> Traced:
        return Traced(dict.fromkeys(("laplace", "gumbel", "knorm"), 1 / event.epsilon))


class _Objective(EventRule):
    def is_possible(self, event: Any) -> bool:
        return bool(0 < event.noise_multiplier < math.inf and 0 <= event.curvature_ratio < math.inf)

    def pld(self, event: Any, count: int, grid: float, adjacency: Relation) -> PrivacyLossDistribution:
        return _of_objective(event, grid).self_compose(count)

    def rdp(self, event: Any, orders: Orders, adjacency: Relation) -> np.ndarray:
        return _rdp_of_objective(event, np.array(orders))


class _Renyi(EventRule):
    def is_possible(self, event: Any) -> bool:
        return bool(1 < event.order < math.inf and event.bound >= 0)

    def rdp(self, event: Any, orders: Orders, adjacency: Relation) -> np.ndarray:
        return np.where(
            np.array(orders) <= event.order, event.bound, math.inf
        )  # it never falls as the order grows


class _ZCDP(EventRule):
    """What is known of groups (Bun and Steinke 2016, Proposition 1.9), and replacing moves two records."""

    def is_possible(self, event: Any) -> bool:
        return bool(event.rho >= 0 and event.xi >= 0)

    def replacing(self, event: Any) -> dp.DpEvent:
        return super().replacing(event) if event.xi else dp.dp_event.ZCDpEvent(4 * event.rho)

    def rho(self, event: Any) -> float:
        return super().rho(event) if event.xi else float(event.rho)

    def grouped(self, event: Any, count: int) -> dp.DpEvent:
        return super().grouped(event, count) if event.xi else dp.dp_event.ZCDpEvent(count**2 * event.rho)

    def traced(self, event: Any) -> Traced:
        if event.xi:
            return Traced({})
        return Traced({"gumbel": math.sqrt(1 / (8 * event.rho)), "laplace": math.sqrt(1 / (2 * event.rho))})


class _Poisson(EventRule):
    def is_possible(self, event: Any) -> bool:
        return bool(0 <= event.sampling_probability <= 1)

    def pure_epsilon(self, event: Any) -> float:
        return _of_sample(event.sampling_probability, rule_of(event.event).pure_epsilon(event.event))

    def replacing(self, event: Any) -> dp.DpEvent:
        return rule_of(event.event).poisson_replacing(event.event, event.sampling_probability)

    def amplified(self, event: Any) -> dp.DpEvent:
        return rule_of(event.event).poisson_amplified(event.event, event.sampling_probability)

    def traced(self, event: Any) -> Traced:
        inner = rule_of(event.event).traced(event.event)
        return Traced(inner.multipliers, ("poisson", "importance"), event.sampling_probability)

    def pld(self, event: Any, count: int, grid: float, adjacency: Relation) -> PrivacyLossDistribution:
        rate, inner = event.sampling_probability, event.event
        is_gaussian = isinstance(inner, dp.GaussianDpEvent) and inner.noise_multiplier > 0
        if is_gaussian and 0 < rate < 1 and adjacency is _ADD_OR_REMOVE_ONE:
            return _of_sampled_gaussian(inner.noise_multiplier, rate, grid).self_compose(count)
        return _by_pld(event, count, grid, adjacency)

    def rdp(self, event: Any, orders: Orders, adjacency: Relation) -> np.ndarray:
        own = rule_of(event.event).poisson_rdp(event.event, event.sampling_probability, orders)
        return _rounded_up(_by_rdp(event, orders, adjacency), np.array(orders)) if own is None else own

    def unsampled(self, event: Any, adjacency: Relation) -> dp.DpEvent:
        return rule_of(event.event).unsampled(event.event, adjacency)

    def grouped(self, event: Any, count: int) -> dp.DpEvent:
        return rule_of(event.event).poisson_grouped(event.event, event.sampling_probability, count)


class _WithoutReplacement(EventRule):
    def is_possible(self, event: Any) -> bool:
        return bool(0 <= event.sample_size <= event.source_dataset_size and event.source_dataset_size > 0)

    def is_proven(self, event: Any, adjacency: Relation) -> bool:
        return bool(adjacency is _REPLACE_ONE)

    def replacing(self, event: Any) -> dp.DpEvent:
        return rule_of(event.event).sample_replacing(
            event.event, event.source_dataset_size, event.sample_size
        )

    def traced(self, event: Any) -> Traced:
        inner, rate = rule_of(event.event).traced(event.event), event.sample_size / event.source_dataset_size
        return Traced(inner.multipliers, ("without replacement",), rate)

    def rdp(self, event: Any, orders: Orders, adjacency: Relation) -> np.ndarray:
        return _rounded_up(_by_rdp(event, orders, adjacency), np.array(orders))

    def unsampled(self, event: Any, adjacency: Relation) -> dp.DpEvent:
        return rule_of(event.event).unsampled(event.event, adjacency) if adjacency is _REPLACE_ONE else event


class _Compound(EventRule):
    """An event of others, each of which is taken in the same way."""

    def replacing(self, event: Any) -> dp.DpEvent:
        return _with_parts(event, lambda inner: rule_of(inner).replacing(inner))

    def amplified(self, event: Any) -> dp.DpEvent:
        return _with_parts(event, lambda inner: rule_of(inner).amplified(inner))

    def unsampled(self, event: Any, adjacency: Relation) -> dp.DpEvent:
        return _with_parts(event, lambda inner: rule_of(inner).unsampled(inner, adjacency))

    def grouped(self, event: Any, count: int) -> dp.DpEvent:
        return _with_parts(event, lambda inner: rule_of(inner).grouped(inner, count))


class _SelfComposed(_Compound):
    def is_possible(self, event: Any) -> bool:
        return bool(event.count >= 0)

    def pure_epsilon(self, event: Any) -> float:
        return float(event.count * rule_of(event.event).pure_epsilon(event.event))

    def pld(self, event: Any, count: int, grid: float, adjacency: Relation) -> PrivacyLossDistribution:
        return rule_of(event.event).pld(event.event, count * event.count, grid, adjacency)

    def rdp(self, event: Any, orders: Orders, adjacency: Relation) -> np.ndarray:
        return int(event.count) * rule_of(event.event).rdp(event.event, orders, adjacency)

    def rho(self, event: Any) -> float:
        return float(event.count * rule_of(event.event).rho(event.event))


class _Composed(_Compound):
    def traced(self, event: Any) -> Traced:
        match event.events:
            case [ObjectivePerturbationDpEvent(noise_multiplier=z), dp.GaussianDpEvent()]:
                return Traced({"objectivenoise": z})
            case [PureDpEvent(epsilon=epsilon), PureDpEvent()]:
                return Traced({"pureobjectivenoise": 1 / epsilon})
        return Traced({})

    def pure_epsilon(self, event: Any) -> float:
        return math.fsum(rule_of(inner).pure_epsilon(inner) for inner in event.events)

    def pld(self, event: Any, count: int, grid: float, adjacency: Relation) -> PrivacyLossDistribution:
        return loss_of(((inner, count) for inner in event.events), grid, adjacency)

    def rdp(self, event: Any, orders: Orders, adjacency: Relation) -> np.ndarray:
        return sum(
            (rule_of(inner).rdp(inner, orders, adjacency) for inner in event.events), np.zeros(len(orders))
        )

    def rho(self, event: Any) -> float:
        return math.fsum(rule_of(inner).rho(inner) for inner in event.events)


class _Either(_Composed):
    def pure_epsilon(self, event: Any) -> float:
        return max(rule_of(inner).pure_epsilon(inner) for inner in event.events)

    def is_possible(self, event: Any) -> bool:
        return bool(event.events)

    def pld(self, event: Any, count: int, grid: float, adjacency: Relation) -> PrivacyLossDistribution:
        """At each epsilon the largest delta of the events: a mixture has at most that."""
        every = [
            loss_of([(inner, 1)], grid, adjacency) for inner in {repr(e): e for e in event.events}.values()
        ]
        one = every[0]
        if len(every) > 1:
            curves = [_curves_of(pld) for pld in every]
            largest = max(float(pld.get_epsilon_for_delta(_TAIL_DELTA)) for pld in every)
            one = _of_curves(
                lambda at: np.max([remove(at) for remove, _ in curves], axis=0),
                lambda at: np.max([add(at) for _, add in curves], axis=0),
                largest,
                grid,
            )
        return one if count == 1 else one.self_compose(count)

    def rdp(self, event: Any, orders: Orders, adjacency: Relation) -> np.ndarray:
        found: np.ndarray = np.max([rule_of(e).rdp(e, orders, adjacency) for e in event.events], axis=0)
        return found

    def rho(self, event: Any) -> float:
        return max(rule_of(inner).rho(inner) for inner in event.events)


class _Selection(EventRule):
    """The best of a random number of repetitions; by Rényi divergences and by privacy profiles.

    The number is truncated negative binomial, or Poisson where the shape is infinite, null in a document.

    Source: Papernot and Steinke 2022, arXiv:2110.03620, Theorems 2 and 6; Koskela, Redberg and Wang 2024,
    arXiv:2402.06701.
    """

    def is_possible(self, event: Any) -> bool:
        return bool(1 <= event.mean < math.inf and event.shape >= 0)

    def to_json(self, event: Any) -> dict[str, Any]:
        shape = event.shape if math.isfinite(event.shape) else None
        return {"event": event_to_json(event.event), "mean": event.mean, "shape": shape}

    def from_json(self, kind: type[dp.DpEvent], document: Mapping[str, Any]) -> dp.DpEvent:
        is_poisson = document.get("shape", 0.0) is None
        known = super().from_json(kind, {**document, "shape": 1.0} if is_poisson else document)
        return attrs.evolve(known, shape=math.inf) if is_poisson else known

    def replacing(self, event: Any) -> dp.DpEvent:
        return attrs.evolve(event, event=rule_of(event.event).replacing(event.event))

    def amplified(self, event: Any) -> dp.DpEvent:
        return attrs.evolve(event, event=rule_of(event.event).amplified(event.event))

    def pld(self, event: Any, count: int, grid: float, adjacency: Relation) -> PrivacyLossDistribution:
        """By profiles: delta(epsilon + shift) of the best is at most the mean number times delta(epsilon) of one.

        With f the generating function of the number, the best has density q(y) f'(Q(y)), where Q(y) is the chance of
        no better than y. So a shift is enough that bounds log f'(Q) - log f'(Q'), and f' is at most f'(1), the mean.
        """
        once = rule_of(event.event).pld(event.event, 1, grid, adjacency)
        remove, add = _curves_of(once)
        shift = _shift_of_selection(event, lambda at: np.maximum(remove(at), add(at)), grid)
        best = _of_curves(
            lambda at: event.mean * remove(at - shift),
            lambda at: event.mean * add(at - shift),
            shift + float(once.get_epsilon_for_delta(_TAIL_DELTA)),
            grid,
        )
        return best if count == 1 else best.self_compose(count)

    def rdp(self, event: Any, orders: Orders, adjacency: Relation) -> np.ndarray:
        every = tuple(sorted({*orders, *map(float, DEFAULT_RDP_ORDERS)}))
        once = rule_of(event.event).rdp(event.event, every, adjacency)
        found = _compute_rdp_repeat_and_select(every, once, event.mean, event.shape)
        return np.array([found[every.index(order)] for order in orders])


_RULES: dict[type[dp.DpEvent], EventRule] = {
    dp.NoOpDpEvent: _Nothing(),
    dp.NonPrivateDpEvent: _NotPrivate(),
    dp.GaussianDpEvent: _Gaussian(),
    dp.LaplaceDpEvent: _Laplace(),
    dp.PoissonSampledDpEvent: _Poisson(),
    dp.SampledWithoutReplacementDpEvent: _WithoutReplacement(),
    dp.SelfComposedDpEvent: _SelfComposed(),
    dp.ComposedDpEvent: _Composed(),
    dp.dp_event.ZCDpEvent: _ZCDP(),
    dp.dp_event.RepeatAndSelectDpEvent: _Selection(),
    EitherDpEvent: _Either(),
    dp.dp_event.TruncatedSubsampledGaussianDpEvent: EventRule(),
    PureDpEvent: _Pure(),
    ObjectivePerturbationDpEvent: _Objective(),
    RenyiDpEvent: _Renyi(),
}


def register(kind: type[dp.DpEvent], rule: EventRule) -> None:
    """Makes a class of events known to every accountant, filter and document; raises RefusedError for a name that
    is.
    """
    if kind.__name__ in {known.__name__ for known in _RULES}:
        raise RefusedError(f"the event {kind.__name__} has a rule already; give the new event another name.")
    _RULES[kind] = rule


def rule_of(event: dp.DpEvent) -> EventRule:
    """The rule of an event's class; of one that is not known, what dp_accounting says of it."""
    return _RULES.get(type(event)) or EventRule()


def parts(event: dp.DpEvent) -> list[dp.DpEvent]:
    """The events that an event is made of."""
    inner = getattr(event, "event", None)
    return [*([] if inner is None else [inner]), *getattr(event, "events", ())]


def _with_parts(event: Any, taken: Callable[[dp.DpEvent], dp.DpEvent]) -> dp.DpEvent:
    """The event with what each of its parts is taken as in their place."""
    if hasattr(event, "events"):
        return attrs.evolve(event, events=[taken(inner) for inner in event.events])
    return attrs.evolve(event, event=taken(event.event))


def event_to_json(event: dp.DpEvent) -> dict[str, Any]:
    """An event as a nested object: its class name under "type", its fields under their own names.

    Raises RefusedError for an event type that the project does not use.
    """
    if type(event) not in _RULES:
        raise RefusedError(f"the event {type(event).__name__} is not one of {_names()}; use one of these.")
    return {"type": type(event).__name__} | rule_of(event).to_json(event)


def event_from_json(document: Mapping[str, Any]) -> dp.DpEvent:
    """The event that `event_to_json` wrote.

    Raises RefusedError for an unknown type, for a missing field and for a field the type does not have.
    """
    name = document.get("type")
    for kind, rule in _RULES.items():
        if kind.__name__ == name:
            return rule.from_json(kind, {key: value for key, value in document.items() if key != "type"})
    raise RefusedError(f"the event type {name!r} is not one of {_names()}; check the document.")


def _names() -> str:
    return ", ".join(kind.__name__ for kind in _RULES)


def _value_to_json(value: Any) -> Any:
    if isinstance(value, dp.DpEvent):
        return event_to_json(value)
    if isinstance(value, list | tuple):
        return [_value_to_json(item) for item in value]
    return value


def _value_from_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return event_from_json(value)
    if isinstance(value, list):
        return [_value_from_json(item) for item in value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RefusedError(f"an event's field must be a number, an event or a list of these, not {value!r}.")
    return value


def loss_of(
    schedule: Iterable[tuple[dp.DpEvent, int]], grid: float, adjacency: Relation
) -> PrivacyLossDistribution:
    """The distribution of the loss of events as `as_add_remove` gives them."""
    total = distributions.identity(grid)
    for event, count in schedule:
        total = total.compose(rule_of(event).pld(event, count, grid, adjacency))
    return total


def _by_pld(event: dp.DpEvent, count: int, grid: float, adjacency: Relation) -> PrivacyLossDistribution:
    accountant = PLDAccountant(adjacency, grid)
    if not accountant.supports(event):
        raise RefusedError(f"the PLD accountant has no bound for {event}; use the other accountant.")
    accountant.compose(event, count)
    return accountant._pld  # it has no public reader


class _SampledGaussianLoss(privacy_loss_mechanism.GaussianPrivacyLoss):  # type: ignore[misc]
    """The privacy loss of dp_accounting, with its inverse at all points of a grid at once instead of one by one.

    That is nine tenths of the time of an epsilon: a fine grid has 100,000 points. At rate 1 it is that of all records.
    """

    def get_delta_for_epsilon(self, epsilon: Any) -> Any:
        """As the class above has it: the divergence at an epsilon, or at each of many."""
        epsilons = np.atleast_1d(np.asarray(epsilon, dtype=float))
        sign = 1.0 if self.adjacency_type is privacy_loss_mechanism.AdjacencyType.REMOVE else -1.0
        least = math.log1p(-self.sampling_prob) if self.sampling_prob < 1 else -math.inf
        losses = sign * epsilons  # adding is removing with the sign of loss and output turned round
        with np.errstate(over="ignore"):  # what overflows is clipped to 0
            deltas = -np.expm1(epsilons) if sign > 0 else np.zeros_like(epsilons)
        inside = (losses > least) & ~np.isclose(losses, least, rtol=1e-9, atol=0.0)
        # log(1 + (e^loss - 1) / q), without overflow; operation by operation as dp_accounting rounds them
        unsampled = sign * losses[inside]
        if self.sampling_prob < 1:
            high, low = losses[inside] + np.log(1 / self.sampling_prob), np.log(-(1 - 1 / self.sampling_prob))
            unsampled = sign * (high + np.log1p(-np.exp(low - high)))
        cutoffs = -0.5 * self.sensitivity - unsampled * self._standard_deviation**2 / self.sensitivity
        cutoffs += 0.0 if sign > 0 else self.sensitivity
        lower = np.exp(epsilons[inside] + self.mu_lower_log_cdf(cutoffs))
        deltas[inside] = self.mu_upper_cdf(cutoffs) - lower
        deltas = np.clip(deltas, 0, 1)
        return float(deltas[0]) if np.ndim(epsilon) == 0 else deltas


def _of_sampled_gaussian(multiplier: float, rate: float, grid: float) -> PrivacyLossDistribution:
    """`from_gaussian_mechanism` of dp_accounting with the loss above."""

    def one(adjacency: privacy_loss_mechanism.AdjacencyType) -> pld_pmf.PLDPmf:
        loss = _SampledGaussianLoss(multiplier, sampling_prob=rate, adjacency_type=adjacency)
        return distributions._create_pld_pmf_from_monotone_privacy_loss(
            loss, value_discretization_interval=grid, use_connect_dots=True
        )

    return distributions._pld_for_subsampled_mechanism(one, rate)


def _by_rdp(event: dp.DpEvent, orders: Orders, adjacency: Relation) -> np.ndarray:
    accountant = RdpAccountant(orders, adjacency)
    if not accountant.supports(event):
        raise RefusedError(f"the RDP accountant has no bound for {event}; use the other accountant.")
    with _quiet_about_dropped_orders():
        accountant.compose(event)
    return np.asarray(accountant._rdp, dtype=np.float64)  # the bounds have no public reader


def _of_pure(epsilon: float, grid: float) -> PrivacyLossDistribution:
    """Of randomised response, which every mechanism with this epsilon can be made from (Kairouz et al. 2015).

    Its loss is epsilon or -epsilon. Each is shared between the grid's points around it so that neither distribution
    loses mass: the result dominates the pair ("connect the dots", Doroshenko et al. 2022), and what one composition
    adds is of the order of the grid's square. Rounding both losses up would add a whole step, each time.
    """
    masses: dict[int, float] = {}
    for loss, mass in ((epsilon, float(expit(epsilon))), (-epsilon, float(expit(-epsilon)))):
        below = math.floor(loss / grid)
        share = min(1.0, max(0.0, math.expm1(below * grid - loss) / math.expm1(-grid)))
        masses[below + 1] = masses.get(below + 1, 0.0) + mass * share
        masses[below] = masses.get(below, 0.0) + mass * (1 - share)
    return PrivacyLossDistribution(pld_pmf.create_pmf(masses, grid, 0.0, pessimistic_estimate=True))


_Deltas = Callable[[np.ndarray], np.ndarray]
"""Upper bounds of delta at epsilons of any sign, shape [k] -> [k]."""


def _curves_of(loss: PrivacyLossDistribution) -> tuple[_Deltas, _Deltas]:
    """Of a record's removal and of its addition."""
    return _curve_of(loss._pmf_remove.to_dense_pmf()), _curve_of(loss._pmf_add.to_dense_pmf())


def _curve_of(pmf: Any) -> _Deltas:
    """delta(e), the sum over losses l above e of p(l) (1 - exp(e - l)), at many points at once."""
    losses = (pmf._lower_loss + np.arange(pmf._probs.size)) * pmf._discretization
    above, scaled = (
        np.append(np.cumsum(terms[::-1])[::-1], 0.0) for terms in (pmf._probs, pmf._probs * np.exp(-losses))
    )

    def deltas(at: np.ndarray) -> np.ndarray:
        first = np.searchsorted(losses, at, side="right")
        found: np.ndarray = pmf._infinity_mass + above[first] - np.exp(at) * scaled[first]
        return found

    return deltas


def _of_curves(remove: _Deltas, add: _Deltas, largest: float, grid: float) -> PrivacyLossDistribution:
    """A distribution whose deltas are at least those of both curves; beyond the largest epsilon the loss is infinite.

    Below 0 a curve is known by the other one: delta(-e) = 1 - exp(-e) (1 - delta'(e)). True curves are convex in
    exp(epsilon), so that they stay below the convex hull of what bounds them ("connect the dots" takes its corners).
    """
    if not largest < _LARGEST_LOSS:
        raise RefusedError("the privacy loss of a trial has too heavy a tail; use the accountant rdp.")
    last = max(1, math.ceil(largest / grid))
    above = np.unique(np.linspace(0, last, min(last + 1, _CORNERS)).round().astype(int))
    places = np.concatenate([-above[:0:-1], above])

    def one(own: _Deltas, other: _Deltas) -> pld_pmf.PLDPmf:
        own_deltas, others = (np.clip(curve(above * grid), 0.0, 1.0) for curve in (own, other))
        below = 1.0 - np.exp(-above[:0:-1] * grid) * (1.0 - others[:0:-1])
        deltas = _lower_hull(np.exp(places * grid), np.concatenate([below, own_deltas]))
        return pld_pmf.create_pmf_pessimistic_connect_dots(grid, places, np.minimum.accumulate(deltas))

    return PrivacyLossDistribution(one(remove, add), one(add, remove))


def _lower_hull(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The largest convex function with no value above y at x, ascending, and none above 1 at 0; its values at x."""
    corners = [(0.0, 1.0)]
    for c in zip(x.tolist(), y.tolist(), strict=True):
        while len(corners) > 1:
            a, b = corners[-2:]
            if (b[1] - a[1]) * (c[0] - a[0]) < (c[1] - a[1]) * (b[0] - a[0]):
                break
            corners.pop()  # b lies on the chord from a to c, or above
        corners.append(c)
    at, height = np.array(corners).T
    found: np.ndarray = np.interp(x, at, height)
    return found


def _shift_of_selection(event: Any, deltas: _Deltas, grid: float) -> float:
    """By how much the best's epsilon exceeds one trial's: bounds log f'(Q) - log f'(Q') for neighbours.

    For any e, 1 - Q' <= exp(e) (1 - Q) + delta(e). A Poisson number has log f' = mean (Q - 1); a truncated negative
    binomial one has f' proportional to (1 - (1 - gamma) Q)^-(shape + 1), of which e bounds the logarithm of the base's
    ratio as soon as (1 - gamma) delta(e) <= gamma (exp(e) - 1).
    """
    tried = grid * np.arange(0.0, _LARGEST_STEP / grid)
    slack = deltas(tried) * (1 + _NEAR_NOTHING) + _TAIL_DELTA
    if math.isinf(event.shape):
        return float(event.mean * np.min(np.expm1(tried) + slack))
    if event.mean == 1:
        return 0.0
    gamma = float(_gamma_truncated_negative_binomial(event.shape, event.mean))
    enough = np.flatnonzero((1 - gamma) * slack <= gamma * np.expm1(tried))
    if not len(enough):
        raise RefusedError("a trial tells too much for the profile of the best; use the accountant rdp.")
    return float((event.shape + 1) * tried[enough[0]])


def _of_objective(event: ObjectivePerturbationDpEvent, grid: float) -> PrivacyLossDistribution:
    """The loss is at most log(1 + ratio) + s^2 / 2 + |X| with X normal of standard deviation s = 1 / multiplier.

    Between two minima the density changes by the Jacobian, a change of rank one, and by the density of the random
    term, which is moved by a record's gradient: along that record's features and by at most its bound.
    """
    s = 1.0 / event.noise_multiplier
    least = math.log1p(event.curvature_ratio) + s**2 / 2
    first, last = math.ceil(least / grid), math.ceil((least + _TAIL * s) / grid)
    places = np.arange(first, last + 1)
    below = 2.0 * norm.cdf((places * grid - least) / s) - 1.0
    masses = np.diff(np.maximum(below, 0.0), prepend=0.0)
    tail = float(2.0 * norm.sf((last * grid - least) / s))
    losses = {int(place): float(mass) for place, mass in zip(places, masses, strict=True)}
    return PrivacyLossDistribution(pld_pmf.create_pmf(losses, grid, tail, pessimistic_estimate=True))


def _rounded_up(divergences: np.ndarray, orders: np.ndarray) -> np.ndarray:
    """Bounds of a sample, logarithms over (order - 1): infinite where they overflowed, and the least with room.

    Rounding takes up to 1e-15 times the order from a logarithm, which counts where it is near 0: a large number of
    such events must not cost nothing, nor one less than nothing.
    """
    least = np.nan_to_num(divergences, nan=math.inf, posinf=math.inf).clip(min=0.0)
    is_near_zero = least * (orders - 1) < _NEAR_ZERO * orders
    raised: np.ndarray = least + np.where(is_near_zero, _ROUNDING * orders / (orders - 1), 0.0)
    return raised


def _rdp_of_pure(epsilon: float, orders: np.ndarray) -> np.ndarray:
    """Of randomised response, which every mechanism with this epsilon can be made from (Mironov 2017, Prop. 5)."""
    truth = -np.logaddexp(0.0, -epsilon)
    lie = truth - epsilon
    moments = np.logaddexp(orders * truth + (1 - orders) * lie, orders * lie + (1 - orders) * truth)
    # Near 0 rounding takes all of the moments; this bound is as tight there (Bun and Steinke 2016, Proposition 3.3).
    divergences = np.where(moments < _NEAR_NOTHING, orders * epsilon**2 / 2, moments / (orders - 1))
    return np.clip(divergences, 0.0, epsilon)


def _rdp_of_objective(event: ObjectivePerturbationDpEvent, orders: np.ndarray) -> np.ndarray:
    """Of the privacy loss that `_of_objective` bounds: Redberg, Koskela and Wang 2023."""
    s = 1.0 / event.noise_multiplier
    divergences: np.ndarray = (
        math.log1p(event.curvature_ratio)
        + orders * s**2 / 2
        + (math.log(2.0) + log_ndtr((orders - 1) * s)) / (orders - 1)
    )
    return divergences


def _of_sample(rate: float, epsilon: float) -> float:
    """ln(1 + rate (e^epsilon - 1)), without overflow (Balle, Barthe and Gaboardi 2018, Theorems 8 and 9)."""
    if epsilon < 1.0:
        return math.log1p(rate * math.expm1(epsilon))
    with np.errstate(divide="ignore"):  # of a rate of 0 or 1
        return float(np.logaddexp(np.log1p(-rate), np.log(rate) + epsilon))


def _any_of(count: int, rate: float) -> float:
    return 1.0 if rate == 1 else -math.expm1(count * math.log1p(-rate))


@contextmanager
def _quiet_about_dropped_orders() -> Iterator[None]:
    """The RDP accountant warns when it drops an order whose series is slow; the bound stays valid."""
    absl = logging.getLogger("absl")
    level = absl.level
    absl.setLevel(logging.ERROR)
    try:
        yield
    finally:
        absl.setLevel(level)

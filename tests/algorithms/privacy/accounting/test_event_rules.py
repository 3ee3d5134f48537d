"""What replacing a record costs: by event, nested or not, by every accountant; and what has no cost at all."""

import math
import re
from collections.abc import Iterator
from typing import Any

import dp_accounting as dp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from algorithms.errors import RefusedError
from algorithms.privacy.accounting.epsilon import (
    ADD_OR_REMOVE_ONE,
    REPLACE_ONE,
    adjacency_named,
    compose_loss,
    epsilon,
    event_for_accountants,
    group_privacy,
    merge_events,
    rdp,
)
from algorithms.privacy.accounting.event_rules import pure_epsilon_of_sample, rule_of
from algorithms.privacy.accounting.events import (
    CorrelatedDpEvent,
    DisjointPartsDpEvent,
    EitherDpEvent,
    ObjectivePerturbationDpEvent,
    PureDpEvent,
    RandomAllocationDpEvent,
    RenyiDpEvent,
    Schedule,
    count_same,
)
from tests.support.refusals import refused_as

GAUSSIAN, LAPLACE, PURE = dp.GaussianDpEvent(2.0), dp.LaplaceDpEvent(3.0), PureDpEvent(0.4)
SAMPLED = dp.PoissonSampledDpEvent(0.1, GAUSSIAN)
ZCDP = dp.dp_event.ZCDpEvent(0.01)
DELTA = 1e-5


def fixed(inner: dp.DpEvent, size: int = 10, records: int = 100) -> dp.DpEvent:
    return dp.SampledWithoutReplacementDpEvent(records, size, inner)


@pytest.mark.parametrize(
    ("event", "plain"),
    [
        (dp.NoOpDpEvent(), dp.NoOpDpEvent()),
        (dp.NonPrivateDpEvent(), dp.NonPrivateDpEvent()),
        (GAUSSIAN, dp.GaussianDpEvent(1.0)),
        (LAPLACE, dp.LaplaceDpEvent(1.5)),
        (PURE, PureDpEvent(0.8)),
        (ZCDP, dp.dp_event.ZCDpEvent(0.04)),
        (SAMPLED, SAMPLED),
        (fixed(GAUSSIAN), fixed(dp.GaussianDpEvent(1.0))),
        (fixed(LAPLACE), PureDpEvent(math.log(1 + 0.1 * (math.exp(2 / 3) - 1)))),
        (fixed(PURE), PureDpEvent(math.log(1 + 0.1 * (math.exp(0.8) - 1)))),
        (fixed(dp.SelfComposedDpEvent(LAPLACE, 2)), PureDpEvent(math.log(1 + 0.1 * (math.exp(4 / 3) - 1)))),
    ],
)
def test_what_replacing_a_record_is_worth(event: dp.DpEvent, plain: dp.DpEvent) -> None:
    assert event_for_accountants(REPLACE_ONE, event) == plain or (
        event_for_accountants(REPLACE_ONE, event).epsilon == pytest.approx(plain.epsilon, rel=1e-12)
    )


AMPLIFIED = (dp.PoissonSampledDpEvent(0.1, PURE), dp.PoissonSampledDpEvent(0.1, LAPLACE))
OBJECTIVE = ObjectivePerturbationDpEvent(9.0, 0.01)
BY_SUBSET = (fixed(GAUSSIAN), fixed(LAPLACE))
EVENTS = (GAUSSIAN, LAPLACE, PURE, ZCDP, SAMPLED, OBJECTIVE, *AMPLIFIED, *BY_SUBSET)
NOT_PURE = (GAUSSIAN, ZCDP, SAMPLED, OBJECTIVE)
REFUSED = [
    ("pld", ADD_OR_REMOVE_ONE, {ZCDP, *BY_SUBSET}),
    ("rdp", ADD_OR_REMOVE_ONE, {*BY_SUBSET}),
    ("pure", ADD_OR_REMOVE_ONE, {*NOT_PURE, *BY_SUBSET}),
    ("pld", REPLACE_ONE, {ZCDP, OBJECTIVE, *AMPLIFIED}),
    ("rdp", REPLACE_ONE, {SAMPLED, OBJECTIVE, *AMPLIFIED}),
    ("pure", REPLACE_ONE, {*NOT_PURE, *AMPLIFIED, fixed(GAUSSIAN)}),
]


@pytest.mark.parametrize(("accountant", "adjacency", "refused"), REFUSED)
def test_an_event_costs_the_same_however_it_is_nested(accountant: Any, adjacency: Any, refused: Any) -> None:
    def cost(event: dp.DpEvent, count: int = 1) -> float:
        delta = 0.0 if accountant == "pure" else DELTA
        settings = {"accountant": accountant, "adjacency": adjacency, "discretisation": 1e-3}
        return epsilon([(event, count)], delta, **settings)

    for event in EVENTS:
        twice = dp.SelfComposedDpEvent(event, 2)
        nested = [(twice, 2), (dp.SelfComposedDpEvent(event, 4), 1)]
        nested += [(dp.ComposedDpEvent([twice, dp.ComposedDpEvent([event] * 2)]), 1)]
        if event not in refused:
            assert [cost(*one) for one in nested] == pytest.approx([cost(event, 4)] * 3, rel=1e-3)
            continue
        for one in [(event, 4), *nested]:
            with pytest.raises(RefusedError):
                cost(*one)


def stated(event: dp.DpEvent, count: int = 1) -> Any:
    return compose_loss([(event, count)], REPLACE_ONE, grid=1e-3)


@pytest.mark.parametrize("loss", [0.0, 0.3, 1.0, 2.0])
def test_the_cost_of_replacing_is_that_of_the_worst_pair(loss: float) -> None:
    """A record of gradient C v becomes one of -C v; under Poisson sampling both have one coin."""
    points = np.linspace(-40.0, 40.0, 80_001)

    def exact(p: Any, q: Any) -> float:
        return float(np.maximum(p - np.exp(loss) * q, 0.0).sum() * (points[1] - points[0]))

    normal = [stats.norm.pdf(points, centre, 2.0) for centre in (-1.0, 0.0, 1.0)]
    mixed = [0.9 * normal[1] + 0.1 * normal[place] for place in (0, 2)]
    sharp = [stats.laplace.pdf(points, centre, 3.0) for centre in (-1.0, 1.0)]
    for event, pair in ((GAUSSIAN, normal[::2]), (SAMPLED, mixed), (LAPLACE, sharp)):
        for p, q in (pair, pair[::-1]):
            assert exact(p, q) == pytest.approx(stated(event).deltas([loss])[0], rel=1e-2, abs=1e-6)


@pytest.mark.parametrize("accountant", ["pld", "rdp", "pure"])
@pytest.mark.parametrize(
    ("adjacency", "event"),
    [
        (ADD_OR_REMOVE_ONE, fixed(GAUSSIAN)),
        (ADD_OR_REMOVE_ONE, fixed(LAPLACE)),
        (REPLACE_ONE, dp.PoissonSampledDpEvent(0.1, LAPLACE)),
        (REPLACE_ONE, dp.PoissonSampledDpEvent(0.1, PURE)),
        (REPLACE_ONE, ObjectivePerturbationDpEvent(2.0, 0.1)),
        (REPLACE_ONE, dp.dp_event.ZCDpEvent(0.1, 0.1)),
        (ADD_OR_REMOVE_ONE, dp.GaussianDpEvent(0.0)),
        (ADD_OR_REMOVE_ONE, dp.GaussianDpEvent(-1.0)),
        (ADD_OR_REMOVE_ONE, dp.GaussianDpEvent(math.nan)),
        (ADD_OR_REMOVE_ONE, dp.LaplaceDpEvent(-1.0)),
        (ADD_OR_REMOVE_ONE, dp.PoissonSampledDpEvent(0.1, dp.GaussianDpEvent(0.0))),
        (ADD_OR_REMOVE_ONE, dp.PoissonSampledDpEvent(1.5, GAUSSIAN)),
        (ADD_OR_REMOVE_ONE, PureDpEvent(-1.0)),
        (ADD_OR_REMOVE_ONE, ObjectivePerturbationDpEvent(0.0, 0.1)),
        (ADD_OR_REMOVE_ONE, ObjectivePerturbationDpEvent(2.0, -0.9)),
        (ADD_OR_REMOVE_ONE, dp.dp_event.ZCDpEvent(-0.1)),
        (ADD_OR_REMOVE_ONE, dp.SelfComposedDpEvent(GAUSSIAN, -1)),
        (REPLACE_ONE, fixed(GAUSSIAN, size=101)),
    ],
)
def test_what_has_no_theorem_is_refused_however_deep(
    event: dp.DpEvent, adjacency: Any, accountant: Any
) -> None:
    """Neither alone nor added up with others, of the same kind or not."""
    delta, other = (0.0, LAPLACE) if accountant == "pure" else (DELTA, GAUSSIAN)
    for one in (event, dp.SelfComposedDpEvent(event, 2), dp.ComposedDpEvent([LAPLACE, event])):
        with pytest.raises(RefusedError):
            epsilon([(one, 3), (LAPLACE, 1), (other, 1)], delta, accountant=accountant, adjacency=adjacency)


def test_an_unknown_adjacency_is_refused() -> None:
    assert adjacency_named("REPLACE_ONE") is REPLACE_ONE
    for name in ("REPLACE_SPECIAL", "replace_one", ""):
        with pytest.raises(RefusedError, match="is not known"):
            adjacency_named(name)


@given(
    gaussian=st.lists(st.tuples(st.floats(0.5, 50), st.integers(1, 4)), max_size=6),
    laplace=st.lists(st.tuples(st.floats(2, 200), st.integers(1, 4)), max_size=60),
    adjacency=st.sampled_from([ADD_OR_REMOVE_ONE, REPLACE_ONE]),
)
@settings(max_examples=40, deadline=None)
def test_fewer_kinds_of_events_cost_at_least_as_much(gaussian: Any, laplace: Any, adjacency: Any) -> None:
    schedule: Schedule = [(dp.GaussianDpEvent(z), count) for z, count in gaussian]
    schedule += [(SAMPLED, 2)] if adjacency is ADD_OR_REMOVE_ONE else []
    schedule += [(dp.LaplaceDpEvent(z), count) for z, count in laplace]
    few = merge_events(schedule)
    assert len(few) <= len(schedule)
    before, after = (rdp(events, adjacency=adjacency) for events in (schedule, few))
    assert (after >= before * (1 - 1e-9)).all()
    assert sum(n for e, n in few if isinstance(e, dp.LaplaceDpEvent)) == sum(n for _, n in laplace)


def test_equal_events_are_one_kind() -> None:
    for event in (GAUSSIAN, LAPLACE, SAMPLED):
        assert merge_events([(event, 1), (event, 2)]) == [(event, 3)]


def by_pld(schedule: Schedule) -> float:
    return compose_loss(schedule, REPLACE_ONE, grid=1e-3).epsilon(DELTA)


def test_many_kinds_of_normal_noise_are_one() -> None:
    normal = [(dp.GaussianDpEvent(5.0 + t), 2) for t in range(4)]
    assert len(merge_events(normal)) == 1
    assert by_pld(merge_events(normal)) == pytest.approx(by_pld(normal), rel=5e-3)


def test_refusals_name_the_mechanism() -> None:
    """No internal representation of an event, such as ObjectivePerturbationDpEvent(noise_multiplier=...)."""
    codes = {"no_bound_replace_one", "poisson_no_bound_replace_one"}
    nested = dp.SelfComposedDpEvent(dp.ComposedDpEvent([OBJECTIVE, GAUSSIAN]), 2)
    for event in (OBJECTIVE, nested, dp.PoissonSampledDpEvent(0.1, LAPLACE)):
        for accountant in ("pld", "rdp"):
            with pytest.raises(RefusedError) as error:
                epsilon([(event, 1)], 1e-5, accountant=accountant, adjacency=REPLACE_ONE)
            assert error.value.code in codes
            assert "(" not in str(error.value) and "DpEvent" not in str(error.value)
    with refused_as("no_bound_replace_one", mechanism="objective perturbation"):
        epsilon([(OBJECTIVE, 1)], 1e-5, adjacency=REPLACE_ONE)


@pytest.mark.parametrize("count", [0.9, 2.5, math.inf, math.nan])
def test_a_part_of_a_release_is_no_number_of_releases(count: float) -> None:
    repeated = dp.SelfComposedDpEvent(GAUSSIAN, count)
    for accountant in ("pld", "rdp"):
        with pytest.raises(RefusedError, match="no mechanism"):
            epsilon([(repeated, 1)], 1e-5, accountant=accountant)


def test_impossible_numbers_are_named_without_the_class() -> None:
    with pytest.raises(RefusedError) as error:
        epsilon([(dp.PoissonSampledDpEvent(0.1, dp.GaussianDpEvent(-2.0)), 1)], 1e-5)
    assert "Gaussian noise is no mechanism with these numbers (noise_multiplier -2.0)" in str(error.value)
    assert "DpEvent" not in str(error.value)


@pytest.mark.parametrize("adjacency", [ADD_OR_REMOVE_ONE, REPLACE_ONE], ids=lambda relation: relation.name)
@pytest.mark.parametrize("accountant", ["pld", "rdp", "pure"])
def test_a_refusal_of_an_accountant_has_a_code_and_names_no_class(accountant: Any, adjacency: Any) -> None:
    gaussian = dp.GaussianDpEvent(1.0)
    objective = ObjectivePerturbationDpEvent(1.0, 0.1)
    events = [
        *(gaussian, objective, RandomAllocationDpEvent(1.0, 5, 5), RenyiDpEvent(4.0, 0.1)),
        *(CorrelatedDpEvent(1.0, (1.0,), (), (), 0, 4, 1.0, 4), dp.ZCDpEvent(0.1, 0.2)),
        *(dp.SampledWithoutReplacementDpEvent(100, 10, gaussian), dp.ComposedDpEvent([objective, gaussian])),
        *(dp.PoissonSampledDpEvent(0.1, event) for event in (objective, dp.ZCDpEvent(0.1))),
        group_privacy(dp.PoissonSampledDpEvent(0.1, gaussian), 2),
    ]
    refusals = []
    for event in events:
        try:
            epsilon([(event, 1)], 1e-5, accountant=accountant, adjacency=adjacency)
        except RefusedError as refusal:
            refusals.append(refusal)
    assert refusals
    for refusal in refusals:
        assert refusal.code, str(refusal)
        assert not re.search(r"DpEvent|[A-Z][a-z]+[A-Z]|multiplier=", str(refusal)), str(refusal)


def test_a_row_counts_at_each_of_its_places() -> None:
    """One object at several places, an equal one, and rows that exist only while they are read."""

    class Read(list[tuple[dp.DpEvent, int]]):
        def __iter__(self) -> Iterator[tuple[dp.DpEvent, int]]:
            return (
                (dp.GaussianDpEvent(event.noise_multiplier), count) for event, count in super().__iter__()
            )

    two, one = (dp.GaussianDpEvent(1.0), 2), (dp.GaussianDpEvent(2.0), 1)
    schedule = [two, two, one, (dp.GaussianDpEvent(1.0), 3), two]
    for rows in (schedule, Read(schedule)):
        assert count_same(rows) == [(dp.GaussianDpEvent(1.0), 9), (dp.GaussianDpEvent(2.0), 1)]


@pytest.mark.parametrize("kind", [dp.ComposedDpEvent, EitherDpEvent, DisjointPartsDpEvent])
def test_no_release_of_a_trace_has_no_epsilon_or_is_a_choice(kind: Any) -> None:
    """Pure noise in an objective is a composition of two pure events whose first has an epsilon."""
    nothing = kind([PureDpEvent(0.0), PureDpEvent(1.0)])
    assert rule_of(nothing).trace_fields(nothing).multipliers == {}
    both = kind([PureDpEvent(0.5), PureDpEvent(1.0)])
    expected = {"pureobjectivenoise": 2.0} if kind is dp.ComposedDpEvent else {}
    assert rule_of(both).trace_fields(both).multipliers == expected


def test_a_sample_that_reads_nobody_costs_nothing_whatever_it_would_tell() -> None:
    assert pure_epsilon_of_sample(0.0, math.inf) == pure_epsilon_of_sample(0.0, 0.5) == 0.0
    assert pure_epsilon_of_sample(1.0, math.inf) == pure_epsilon_of_sample(0.1, math.inf) == math.inf


@pytest.mark.parametrize("rate", [0.5, 1.0])
def test_a_strategy_whose_first_coefficient_is_next_to_nothing_is_refused(rate: float) -> None:
    """Its square is 0 in a float, and so would be what a record moves."""
    with pytest.raises(RefusedError, match="no mechanism"):
        epsilon([(CorrelatedDpEvent(1.0, (1e-300,), (), (), 0, 4, rate, 4), 1)], DELTA)

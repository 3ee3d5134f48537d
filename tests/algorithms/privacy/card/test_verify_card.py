"""The verifier of one file agrees with `card verify`, accepts sharper prices, and takes no understated one."""

import ast
import json
import math
import random
import re
import shutil
import subprocess
import sys
from collections import Counter
from contextlib import nullcontext
from functools import reduce
from pathlib import Path
from typing import Any

import dp_accounting as dp
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from dp_accounting.pld.pld_pmf import DensePLDPmf
from scipy.optimize import brentq
from scipy.stats import binom

from algorithms.errors import RefusedError
from algorithms.privacy.accounting.epsilon import adjacency_named
from algorithms.privacy.accounting.event_classes import EitherDpEvent, SampledGroupDpEvent
from algorithms.privacy.accounting.events import (
    CorrelatedDpEvent,
    CorrelatedStepDpEvent,
    ObjectivePerturbationDpEvent,
    PureDpEvent,
    RandomAllocationDpEvent,
    RandomAllocationStepDpEvent,
    Schedule,
    Trials,
    all_shown,
    event_to_json,
    on_disjoint_parts,
    schedule_to_json,
    trial_event,
)
from algorithms.privacy.card import load, public_key_of, recompute, verify, verify_card
from algorithms.privacy.card.schema import CompositionSection, PrivacyCard
from tests.algorithms.privacy.conftest import KEY
from tests.support.bounds_once import bounds_once
from tests.support.card_edits import both_verdicts, edited, sign
from tests.support.changed import changed
from tests.support.odd_cards import odd_card
from tests.support.soak import soak_but
from tests.support.synthetic_run import Folders

__all__ = ["bounds_once"]

GOLDEN = Path(__file__).parents[4] / "tests/golden"
OWNER = public_key_of(KEY)
FIXED = {"kind": "schedule", "rho": None, "order": None, "limit": None}
ADD, REPLACE = "ADD_OR_REMOVE_ONE", "REPLACE_ONE"
EDITS, SOAK_EDITS = 20, 10_000
ODD_CARDS, SOAK_ODD_CARDS = 60, 2_000
GAP, GAP_TWICE = 0.01, 0.02
"""By so much the stated lower bound may lie below the price, and for what is put on a grid twice."""


def _poisson(rate: float, noise: float) -> dp.DpEvent:
    return dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(noise))


def _search(shape: float) -> list[tuple[dp.DpEvent, int]]:
    trials = [[(dp.GaussianDpEvent(20.0), 1), (_poisson(0.1, z), 20)] for z in (3.0, 4.0)]
    return [(Trials(10.0, shape).event(trials), 1)]


def _correlated(coefficients: list[float], rate: float = 1.0, **others: Any) -> CorrelatedDpEvent:
    buffers = {"weights": [], "decays": [], "leaves": 0, "parts": 10} | others
    fields = {"noise_multiplier": 5.0, "coefficients": coefficients, "rate": rate, "steps": 50} | buffers
    return CorrelatedDpEvent(**fields)


SCHEDULES: dict[str, tuple[Schedule, str]] = {
    "gaussian": ([(dp.GaussianDpEvent(2.0), 3)], ADD),
    "gaussian, replaced": ([(dp.GaussianDpEvent(2.0), 3)], REPLACE),
    "poisson": ([(_poisson(0.01, 1.0), 1000)], ADD),
    "poisson, replaced": ([(_poisson(0.01, 1.0), 1000)], REPLACE),
    "little noise": ([(_poisson(0.001, 0.4), 100)], ADD),
    "many steps": ([(_poisson(0.002, 0.8), 20_000)], ADD),
    "two kinds": ([(dp.GaussianDpEvent(100.0), 1), (_poisson(0.1, 0.77), 10), (_poisson(0.1, 1.5), 20)], ADD),
    "laplace": ([(dp.LaplaceDpEvent(10.0), 20)], ADD),
    "sampled laplace": ([(dp.PoissonSampledDpEvent(0.1, dp.LaplaceDpEvent(2.0)), 50)], ADD),
    "pure": ([(PureDpEvent(0.1), 30)], ADD),
    "pure, replaced": ([(PureDpEvent(0.1), 30)], REPLACE),
    "objective": (
        [(dp.ComposedDpEvent([ObjectivePerturbationDpEvent(1.2, 0.1), dp.GaussianDpEvent(5.0)]), 1)],
        ADD,
    ),
    "fixed size": ([(dp.SampledWithoutReplacementDpEvent(1000, 50, dp.GaussianDpEvent(2.0)), 100)], REPLACE),
    "half of the records, much noise": (
        [(dp.SampledWithoutReplacementDpEvent(1000, 500, dp.GaussianDpEvent(200.0)), 100)],
        REPLACE,
    ),
    "fixed size, pure": (
        [(dp.SampledWithoutReplacementDpEvent(100, 10, dp.LaplaceDpEvent(1.0)), 3)],
        REPLACE,
    ),
    "group": ([(SampledGroupDpEvent(8.0, 0.05, 4), 100)], ADD),
    "group, replaced": ([(SampledGroupDpEvent(8.0, 0.05, 4), 100)], REPLACE),
    "random allocation": ([(RandomAllocationDpEvent(1.0, 20, 20), 5)], ADD),
    "a shorter pass": (
        [(RandomAllocationDpEvent(1.0, 40, 40), 1), (RandomAllocationDpEvent(1.0, 40, 15), 1)],
        ADD,
    ),
    "bands": ([(_correlated([1.0, 0.5, 0.3]), 1)], ADD),
    "sampled bands": ([(_correlated([1.0, 0.5], rate=0.2), 1)], ADD),
    "buffers": ([(_correlated([], weights=[0.3, 0.1], decays=[0.9, 0.5]), 1)], ADD),
    "trees": ([(_correlated([], leaves=8, parts=4), 1)], ADD),
    "geometric search": (_search(1.0), ADD),
    "logarithmic search": (_search(0.0), ADD),
    "poisson search": (_search(math.inf), ADD),
    "poisson search of many trials": (
        [(Trials(100.0, math.inf).event([[(dp.GaussianDpEvent(20.0), 1)]]), 1)],
        ADD,
    ),
    "negative binomial search": (_search(2.0), ADD),
    "search, replaced": (_search(1.0), REPLACE),
    "search after a count": ([(dp.GaussianDpEvent(50.0), 1), *_search(1.0)], ADD),
    "search over two kinds": (
        [(Trials(10.0, 1.0).event([[(dp.GaussianDpEvent(6.0), 1)], [(dp.LaplaceDpEvent(5.0), 2)]]), 1)],
        ADD,
    ),
    "all trials": ([(all_shown([[(_poisson(0.1, 2.0), 20)], [(_poisson(0.1, 3.0), 20)]]), 1)], ADD),
    "one of two": (
        [
            (
                EitherDpEvent(
                    [trial_event([(_poisson(0.1, 2.0), 20)]), trial_event([(dp.LaplaceDpEvent(5.0), 3)])]
                ),
                2,
            )
        ],
        ADD,
    ),
    "disjoint parts": (on_disjoint_parts([(_poisson(0.1, 2.0), 20)], [(dp.GaussianDpEvent(4.0), 1)]), ADD),
    "disjoint parts, the second larger": (
        on_disjoint_parts([(_poisson(0.1, 2.0), 20)], [(dp.GaussianDpEvent(1.0), 1)]),
        ADD,
    ),
    "disjoint parts, replaced": (
        on_disjoint_parts([(dp.GaussianDpEvent(2.0), 3)], [(dp.LaplaceDpEvent(9.0), 1)]),
        REPLACE,
    ),
    "zcdp": ([(dp.dp_event.ZCDpEvent(0.01, 0.0), 3), (dp.GaussianDpEvent(3.0), 1)], ADD),
    "zcdp, replaced": ([(dp.dp_event.ZCDpEvent(0.01, 0.0), 3), (dp.GaussianDpEvent(3.0), 1)], REPLACE),
    "refused": ([(dp.SampledWithoutReplacementDpEvent(1000, 50, dp.GaussianDpEvent(2.0)), 3)], ADD),
    "refused, replaced": ([(ObjectivePerturbationDpEvent(1.2, 0.1), 1)], REPLACE),
    "no noise": ([(dp.GaussianDpEvent(2.0), 3), (dp.NonPrivateDpEvent(), 1)], ADD),
}


WITHOUT_FORMULA = {
    *("group", "group, replaced", "random allocation", "a shorter pass", "fixed size"),
    "half of the records, much noise",
}
"""Of these the file has no Renyi bounds."""
TWICE = {name for name in SCHEDULES if "search" in name} | {"one of two"}


def lower_bounds(
    schedule: Schedule, adjacency: str, delta: float = 1e-5, stated: float | None = None
) -> dict[str, float | None]:
    events = json.loads(json.dumps(schedule_to_json(schedule)))
    for row in events:
        verify_card.check(row, "ROW", "an event")
    rows = [(row["event"], row["count"]) for row in events]
    terms = {"delta": delta, "composition": FIXED, "epsilon": {"pld": stated}}
    bounds = verify_card.lower_bounds(rows, adjacency, terms)
    return {name: None if isinstance(bound, str) else bound for name, bound in bounds.items()}


LIKE_OTHERS = {
    *("many steps", "two kinds", "search after a count", "poisson search of many trials"),
    *("half of the records, much noise", "geometric search", "random allocation", "poisson"),
}
"""Rows of which others have one kind each, in other sizes or together."""


@pytest.mark.parametrize("name", soak_but([name for name in SCHEDULES if name not in LIKE_OTHERS], SCHEDULES))
def test_the_bound_of_each_kind_of_event_lies_just_below_its_price(name: str) -> None:
    schedule, adjacency = SCHEDULES[name]
    prices = recompute(schedule, 1e-5, CompositionSection(**FIXED), adjacency_named(adjacency))
    bounds = lower_bounds(schedule, adjacency, stated=prices["pld"])
    has_formula = name not in WITHOUT_FORMULA
    gap = GAP_TWICE if name in TWICE else GAP
    for accountant in ("pld", "rdp", "pure") if has_formula else ("pld", "pure"):
        price, bound = prices[accountant], bounds[accountant]
        if price is None or bound is None:
            assert price is bound, accountant
        else:
            assert (1 - gap) * price <= bound <= price * (1 + 1e-7), accountant
    assert has_formula or bounds["rdp"] is None


@pytest.mark.parametrize(
    ("multiplier", "parts", "passes"),
    soak_but(
        [(0.2, 100, 8), (0.6, 100, 20)],
        [
            (0.11, 100, 1),
            (0.2, 100, 8),
            (0.35, 5, 9),
            (0.39, 1000, 10),
            (0.49, 3, 1),
            (0.5, 1000, 10),
            (0.6, 100, 20),
            (0.75, 1000, 5),
            (3.0, 2, 100),
            (1.0, 1, 3),
        ],
    ),
)
def test_random_allocation_of_any_noise_is_bounded_from_just_below(
    multiplier: float, parts: int, passes: int
) -> None:
    schedule = [(RandomAllocationDpEvent(multiplier, parts, parts), passes)]
    price = recompute(schedule, 1e-5, CompositionSection(**FIXED), adjacency_named(ADD))["pld"]
    bound = lower_bounds(schedule, ADD, stated=price)["pld"]
    assert price is not None
    assert bound is not None
    assert (1 - GAP) * price <= bound <= price


@pytest.mark.parametrize(
    ("multiplier", "parts", "passes"), soak_but([(0.7, 3, 2)], [(0.7, 3, 2), (0.5, 1000, 20)])
)
def test_a_search_over_random_allocation_is_bounded_from_just_below(
    multiplier: float, parts: int, passes: int
) -> None:
    trial = [(RandomAllocationDpEvent(multiplier, parts, parts), passes)]
    schedule = [(Trials(10.0, 1.0).event([trial]), 1)]
    price = recompute(schedule, 1e-5, CompositionSection(**FIXED), adjacency_named(ADD))["pld"]
    bound = lower_bounds(schedule, ADD, stated=price)["pld"]
    assert price is not None
    assert bound is not None
    assert (1 - GAP_TWICE) * price <= bound <= price


@pytest.mark.parametrize(
    "schedule",
    [
        [(RandomAllocationDpEvent(0.39, 2, 1), 5), (dp.GaussianDpEvent(0.3), 7)],
        [(RandomAllocationDpEvent(0.3, 20, 20), 8)],
        [(dp.GaussianDpEvent(0.2), 4), *_search(1.0)],
        [(dp.GaussianDpEvent(0.5), 300)],
        [(dp.LaplaceDpEvent(0.5), 600)],
        [(ObjectivePerturbationDpEvent(0.2, 0.1), 60)],
        [(SampledGroupDpEvent(1.0, 0.9, 4), 100)],
    ],
    ids=["allocation", "passes", "search", "gaussian", "laplace", "objective", "group"],
)
def test_no_bound_lies_above_a_large_price(schedule: Schedule) -> None:
    """Beside other releases a search and a pass with little noise; and epsilons whose exp is beyond a float."""
    price = recompute(schedule, 1e-5, CompositionSection(**FIXED), adjacency_named(ADD))["pld"]
    bound = lower_bounds(schedule, ADD, stated=price)["pld"]
    assert price is not None
    assert bound is not None
    assert (1 - GAP) * price <= bound <= price


def test_the_price_without_delta_is_the_sum() -> None:
    schedule = [(dp.LaplaceDpEvent(10.0), 20), (dp.PoissonSampledDpEvent(0.1, dp.LaplaceDpEvent(2.0)), 5)]
    expected = 2.0 + 5 * math.log(1 + 0.1 * math.expm1(0.5))
    assert lower_bounds(schedule, ADD, 0.0) == {"pld": None, "rdp": None, "pure": pytest.approx(expected)}


def test_the_bound_of_one_gaussian_is_just_below_its_closed_form() -> None:
    """Of noise 1, delta is 1e-5 at epsilon 4.377178 (Balle and Wang 2018)."""
    bound = lower_bounds([(dp.GaussianDpEvent(1.0), 1)], ADD, stated=4.377178)["pld"]
    assert bound is not None
    assert 0.99 * 4.377178 < bound < 4.377178


@pytest.mark.parametrize(
    ("event", "shift", "times"),
    [
        (PureDpEvent(1e-8), 1e-8, 10**9),
        (PureDpEvent(1e-8), 1e-8, 10**18),
        (dp.PoissonSampledDpEvent(1e-8, PureDpEvent(1.0)), 1e-8 * math.expm1(1.0), 10**16),
        (
            dp.PoissonSampledDpEvent(1e-8, dp.LaplaceDpEvent(1.0)),
            1e-8 * math.sqrt((2 * math.exp(1.0) + math.exp(-2.0)) / 3 - 1),
            10**9,
        ),
        (_poisson(1e-3, 1e6), 1e-9, 10**18),
        (_poisson(1e-16, 1.0), 1e-16 * math.sqrt(math.expm1(1.0)), 10**32),
        (_poisson(1e-3, 1e12), 1e-15, 10**30),
    ],
    ids=[
        "pure",
        "much that is pure",
        "sampled pure",
        "sampled laplace",
        "much noise",
        "rare samples",
        "more noise",
    ],
)
def test_many_releases_of_next_to_nothing_are_not_rounded_to_nothing(
    event: dp.DpEvent, shift: float, times: int
) -> None:
    many, left = event, times
    while left > 1:
        many, left = dp.SelfComposedDpEvent(many, min(left, 10**9)), left // min(left, 10**9)
    bounds = lower_bounds([(many, 1)], ADD)
    # Their sum tends to one normal law against another (Dong, Roth and Su 2022, Theorem 3.5), for which no Renyi bound
    # is below the exact epsilon.
    exact = dp.get_epsilon_gaussian(1 / (shift * math.sqrt(times)), 1e-5)
    assert all(
        (math.inf if bounds[name] is None else bounds[name]) >= 0.99 * exact for name in ("pld", "rdp")
    )


def test_what_a_zcdp_filter_let_through_costs_no_less_than_exactly() -> None:
    times, delta = 100, 1e-5
    answers = np.arange(times + 1)
    chances, losses = binom.pmf(answers, times, 1 / (1 + math.exp(-1.0))), 2.0 * answers - times

    def delta_at(epsilon: float) -> float:  # of so many randomised responses (Kairouz et al. 2015)
        return float(chances @ np.maximum(0.0, -np.expm1(epsilon - losses)))

    exact = brentq(lambda epsilon: delta_at(epsilon) - delta, 0.0, 100.0)
    terms = {"delta": delta, "composition": FIXED | {"kind": "zcdp", "rho": 1e-6}, "epsilon": {"rdp": 1.0}}
    bound = verify_card.lower_bounds([({"type": "PureDpEvent", "epsilon": 1.0}, times)], ADD, terms)["rdp"]
    by_rho = times / 2 + 2 * math.sqrt(times / 2 * -math.log(delta))  # Bun and Steinke 2016
    assert isinstance(bound, float)
    assert exact < bound < by_rho


@pytest.mark.parametrize("rate", [1e-9, 0.3, 1.0])
@pytest.mark.parametrize("kind", ["GaussianDpEvent", "LaplaceDpEvent"])
def test_the_profile_of_a_sample_is_that_of_its_densities(kind: str, rate: float) -> None:
    x, tail = np.linspace(-30, 31, 200_001), 1e-60
    with_record, without = (np.exp(-(abs(x - at) ** (2 if "Gauss" in kind else 1)) / 1.5) for at in (1, 0))
    with_record, without = with_record / without.sum(), without / without.sum()
    sample = (1 - rate) * without + rate * with_record
    noise = math.sqrt(0.75) if "Gauss" in kind else 1.5
    event = {"type": kind, "noise_multiplier": noise}
    poisson = {"type": "PoissonSampledDpEvent", "sampling_probability": rate, "event": event}
    pairs = verify_card.pairs_of(poisson, tail)
    for e in (0.1 * rate, 0.01, 0.5):
        for pair, p, q in zip(pairs, (sample, without), (without, sample), strict=True):
            expected, found = (
                np.maximum(one - math.exp(e) * other, 0.0).sum() for one, other in ((p, q), pair)
            )
            assert found == pytest.approx(expected, rel=1e-3, abs=1e-20)


def test_a_release_whose_chances_are_beyond_a_float_has_no_bound() -> None:
    for event in (PureDpEvent(1000.0), dp.LaplaceDpEvent(1e-3), SampledGroupDpEvent(1.0, 0.9, 40)):
        assert lower_bounds([(event, 1)], ADD, stated=1000.0)["pld"] is None


def test_a_claim_that_needs_too_fine_a_grid_has_no_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_card, "MAX_POINTS", 2**9)
    assert lower_bounds([(_poisson(0.01, 1.0), 1000)], ADD, stated=2.1)["pld"] is None


def test_a_sum_of_too_many_points_is_refused_before_it_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    sums: list[int] = []
    compose = DensePLDPmf.self_compose

    def counted(loss: DensePLDPmf, count: int) -> DensePLDPmf:
        sums.append(count)
        return compose(loss, count)

    monkeypatch.setattr(DensePLDPmf, "self_compose", counted)
    bounds = {}
    for points in (2**17, 2**16):  # a release has some 20,000 points, and the sum 70,000 or more
        monkeypatch.setattr(verify_card, "MAX_POINTS", points)
        bounds[points] = lower_bounds([(_poisson(0.01, 1.0), 1000)], ADD, stated=2.1)["pld"]
    assert bounds[2**17] is not None
    assert bounds[2**16] is None
    assert sums == [1000, 1000]  # both directions of the first


@pytest.mark.usefixtures("bounds_once")
@pytest.mark.parametrize("path", sorted(GOLDEN.glob("card-*.json")), ids=lambda path: path.stem)
def test_a_card_of_before_holds(path: Path) -> None:
    owner = (GOLDEN / "owner.pub").read_text().strip()
    assert not [check for check in verify_card.verify(path, key=owner) if check[1] is False]


@pytest.fixture(scope="module")
def cards(folders: Folders, built: PrivacyCard) -> list[tuple[dict[str, Any], Path | None]]:
    """Documents of cards, and the folder of the files beside them."""
    golden = [json.loads(path.read_text()) for path in sorted(GOLDEN.glob("card-*.json"))]
    return [(built.to_json(), folders.artifacts), *((card, None) for card in golden)]


def _agree(cards: list[tuple[dict[str, Any], Path | None]], folder: Path, count: int, seed: int) -> None:
    draw, seen, differing = random.Random(seed), Counter[tuple[str, bool]](), []
    beside = folder / "beside"
    artifacts = next(place for _, place in cards if place is not None)
    beside.mkdir(parents=True)
    for name in ("plan.json", "trace.parquet", "model.safetensors"):
        shutil.copy(artifacts / name, beside)
    (folder / "alone").mkdir()
    for number in range(count):
        document, place = draw.choice(cards) if draw.random() < 0.6 else cards[0]
        name, document = edited(document, draw)
        path = (folder / "alone" if place is None or draw.random() < 0.5 else beside) / "privacy_card.json"
        path.write_bytes(sign(document, KEY))
        ours, theirs = both_verdicts(path, OWNER)
        seen[name, ours] += 1
        if ours != theirs:
            differing.append((number, name, ours, theirs))
            shutil.copy(path, folder / f"{number}.json")
    assert differing == []
    passed = sum(times for (_, held), times in seen.items() if held)
    assert count / 20 < passed < count / 2


@pytest.mark.usefixtures("bounds_once")
def test_both_verifiers_agree_on_edits_that_are_signed_anew(
    cards: list[tuple[dict[str, Any], Path | None]], tmp_path: Path
) -> None:
    _agree(cards, tmp_path, EDITS, 0)


@pytest.mark.soak
@pytest.mark.timeout(3 * 3600)
@pytest.mark.usefixtures("bounds_once")
def test_both_verifiers_agree_on_ten_thousand_edits(
    cards: list[tuple[dict[str, Any], Path | None]], tmp_path: Path
) -> None:
    _agree(cards, tmp_path, SOAK_EDITS, 1)


NOT_COMPUTED = re.compile(
    "finer grid|has no (Renyi bound|privacy profile)|delta is smaller|do not go together|bound: 0.0$|are too large or"
    "|more than .* releases"
)
"""Why the verifier of one file refuses what `card verify` prices: huge epsilons, tiny deltas, no theorem, no loss."""


def _agree_on_odd_cards(folder: Path, count: int, seed: int) -> None:
    golden = [json.loads(path.read_text()) for path in sorted(GOLDEN.glob("card-*.json"))]
    path, draw, held = folder / "privacy_card.json", random.Random(seed), 0
    for _ in range(count):
        card = odd_card(golden, draw)
        path.write_bytes(sign(card, KEY))
        ours, theirs = both_verdicts(path, OWNER)
        held += theirs
        if ours and not theirs:
            try:
                reasons = [why for _, passed, why in verify_card.verify(path, key=OWNER) if passed is False]
            except verify_card.BadCardError as error:  # of correlated noise of very many steps
                reasons = [str(error)] if '"CorrelatedDpEvent"' in json.dumps(card["events"]) else []
            assert any(map(NOT_COMPUTED.search, reasons)), (card["events"], reasons)
        elif theirs and not ours:  # what states more than it costs, where the file knows a bound below alone
            found = verify(load(path), key=OWNER)
            for check in found.failures:
                name = check.name.removeprefix("epsilon by ").lower()
                assert card["accounting"]["epsilon"][name] > (found.recomputed[name] or 0.0), card["events"]
    assert held > count / 20


@pytest.mark.usefixtures("bounds_once")
def test_odd_events_are_refused_by_both_verifiers_or_priced_alike(tmp_path: Path) -> None:
    _agree_on_odd_cards(tmp_path, ODD_CARDS, 0)


@pytest.mark.soak
@pytest.mark.timeout(3 * 3600)
def test_two_thousand_cards_of_odd_events_end_in_a_verdict(tmp_path: Path) -> None:
    _agree_on_odd_cards(tmp_path, SOAK_ODD_CARDS, 1)


@pytest.mark.parametrize(("factor", "holds"), [(1.5, True), (0.9999, True), (0.97, False), (0.5, False)])
def test_a_sharper_price_passes_and_an_understated_one_does_not(
    factor: float, holds: bool, folders: Folders, built: PrivacyCard, tmp_path: Path
) -> None:
    document = built.to_json()
    document["accounting"]["epsilon"]["pld"] *= factor
    document["setting"]["epsilon"] = document["accounting"]["epsilon"]["pld"]
    document["accounting"]["target"]["epsilon"] = 100.0
    (tmp_path / "privacy_card.json").write_bytes(sign(document, KEY))
    failed = [name for name, passed, _ in verify_card.verify(tmp_path, key=OWNER) if passed is False]
    assert failed == ([] if holds else ["epsilon by pld"])


@pytest.mark.parametrize("by_losses", [None, 10.0])
@pytest.mark.parametrize(("factor", "holds"), [(1.0, True), (0.97, False)])
def test_what_is_stated_by_losses_lets_nothing_pass_that_is_stated_by_renyi_bounds(
    by_losses: float | None, factor: float, holds: bool, built: PrivacyCard, tmp_path: Path
) -> None:
    allocation, steps = RandomAllocationDpEvent(4.0, 20, 20), RandomAllocationStepDpEvent(4.0, 20)
    schedule: Schedule = [(allocation, 1), (steps, 19)]
    price = recompute(schedule, 1e-5, CompositionSection(**FIXED), adjacency_named(ADD))["pld"]
    assert price is not None
    document = _stating_what_it_costs(
        built.to_json(), json.loads(json.dumps(schedule_to_json(schedule))), 0.0
    )
    document["accounting"] |= {
        "accountant": "rdp",
        "delta": 1e-5,
        "epsilon": {"pld": by_losses, "rdp": factor * price, "pure": None},
        "target": {"epsilon": None, "delta": 1e-5},
    }
    document["setting"] |= {"epsilon": factor * price, "delta": 1e-5}
    (tmp_path / "privacy_card.json").write_bytes(sign(document, KEY))
    failed = [name for name, passed, _ in verify_card.verify(tmp_path, key=OWNER) if passed is False]
    assert failed == ([] if holds else ["epsilon by rdp"])


WRONG_CARDS: list[tuple[str, object, str]] = [
    ("signature.value", "0" * 128, "signature"),
    ("evidence.files", lambda files: files | {"model.safetensors": "0" * 64}, "model.safetensors"),
    ("mechanism.algorithm", "another", "plan"),
    ("events.1.event.sampling_probability", lambda rate: rate * (1 - 1e-9), "plan"),
    ("accounting.epsilon.rdp", lambda epsilon: 0.999 * epsilon, "epsilon by rdp"),
    ("accounting.epsilon.pure", 1.0, "epsilon by pure"),
    ("setting.epsilon", lambda epsilon: 0.5 * epsilon, "guarantee"),
    ("mechanism.diagnostics", True, "guarantee"),
    ("accounting.target.delta", 1e-9, "target"),
    ("implementation.rounding", None, "rounding"),
    ("mechanism.releases", 10**6, "releases"),
    ("setting.evaluation_epsilon", 9.0, "releases of the people held out"),
    ("setting.epsilon", "0.1", "form"),
    ("setting.pure_epsilon", 0.1, "form"),
    ("events.0.event.epsilon", 0.1, "form"),
    ("events.0.event", {}, "form"),
    ("evidence.files", {"plan.json": "0" * 64}, "form"),
]
"""Cards that their owner signed, each with a fact that one check alone refuses."""


@pytest.mark.usefixtures("bounds_once")
@pytest.mark.parametrize(("place", "value", "check"), WRONG_CARDS)
def test_each_check_refuses_a_card_that_no_other_one_does(
    place: str, value: object, check: str, folders: Folders, built: PrivacyCard, tmp_path: Path
) -> None:
    for name in {"model.safetensors", "plan.json"} & {f"{check}.json", check}:
        shutil.copy(folders.artifacts / name, tmp_path)
    document = changed(built.to_json(), place, value)
    unsigned = (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()
    (tmp_path / "privacy_card.json").write_bytes(unsigned if check == "signature" else sign(document, KEY))
    if check == "form":
        with pytest.raises(verify_card.BadCardError):
            verify_card.verify(tmp_path, key=OWNER)
    else:
        failed = [name for name, passed, _ in verify_card.verify(tmp_path, key=OWNER) if passed is False]
        assert failed == [check]


@pytest.mark.usefixtures("bounds_once")
def test_files_and_key_are_checked(folders: Folders, built: PrivacyCard, tmp_path: Path) -> None:
    for name in ("plan.json", "trace.parquet", "model.safetensors"):
        shutil.copy(folders.artifacts / name, tmp_path)
    (tmp_path / "privacy_card.json").write_bytes(built.to_bytes())
    (tmp_path / "owner.pub").write_text(OWNER + "\n")
    other = public_key_of(Ed25519PrivateKey.from_private_bytes(bytes(range(32))))
    assert verify_card.main([str(tmp_path), "--key", str(tmp_path / "owner.pub")]) == 0
    assert verify_card.main([str(tmp_path), "--key", other]) == 1
    (tmp_path / "trace.parquet").write_bytes(b"another")
    assert verify_card.main([str(tmp_path), "--key", OWNER]) == 1


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff",
        b"7",
        b"[" * 100_000,
        b'{"schema_version": 2}',
        b'{"schema_version": ' + b"9" * 5000 + b"}",
        b'{"schema_version": NaN}',
    ],
    ids=["nothing", "no text", "a number", "deep", "too little", "a long number", "no number"],
)
def test_what_is_no_card_is_refused_in_one_line(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "privacy_card.json").write_bytes(content)
    assert verify_card.main([str(tmp_path)]) == 2
    said = capsys.readouterr().out
    assert said.startswith("No card was checked: ")
    assert said.count("\n") == 1


HOSTILE: list[dict[str, Any]] = [
    {"type": "GaussianDpEvent", "noise_multiplier": 1e-320},
    {"type": "GaussianDpEvent", "noise_multiplier": 1e-6},
    {"type": "PureDpEvent", "epsilon": 1e308},
    {"type": "RepeatAndSelectDpEvent", "event": {"type": "NoOpDpEvent"}, "mean": 1e6, "shape": 1e300},
    {"type": "CorrelatedDpEvent", "noise_multiplier": 1.0, "coefficients": [1e-6, 1e6], "weights": [], "decays": [],
     "leaves": 0, "parts": 1, "rate": 1.0, "steps": 1_000_000},
    {"type": "CorrelatedDpEvent", "noise_multiplier": 1.0, "coefficients": [], "weights": [], "decays": [],
     "leaves": 1, "parts": 1_000_000, "rate": 1.0, "steps": 1_000_000},
    {"type": "SampledGroupDpEvent", "noise_multiplier": 1e12, "sampling_probability": 1e-300, "count": 1000},
    {"type": "RandomAllocationDpEvent", "noise_multiplier": 0.5, "parts": 1_000_000, "steps": 1},
    {"type": "ObjectivePerturbationDpEvent", "noise_multiplier": 1e-6, "curvature_ratio": 1e308},
    {"type": "SelfComposedDpEvent", "count": 10**9, "event": {"type": "SelfComposedDpEvent", "count": 10**9,
     "event": {"type": "PoissonSampledDpEvent", "sampling_probability": 0.5,
               "event": {"type": "GaussianDpEvent", "noise_multiplier": 1.0}}}},
]  # fmt: skip


@pytest.mark.parametrize("event", HOSTILE, ids=lambda event: event["type"])
def test_hostile_numbers_are_no_guarantee(
    event: dict[str, Any], built: PrivacyCard, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = built.to_json() | {"events": [{"event": event, "count": 12}]}
    (tmp_path / "privacy_card.json").write_bytes(sign(document, KEY))
    assert verify_card.main([str(tmp_path)]) in (1, 2)
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.usefixtures("bounds_once")
@pytest.mark.parametrize(("wrappings", "is_read"), [(18, True), (19, False), (60, False)])
def test_both_verifiers_read_events_to_the_same_depth(
    wrappings: int, is_read: bool, built: PrivacyCard, tmp_path: Path
) -> None:
    event = reduce(
        lambda inner, _: {"type": "ComposedDpEvent", "events": [inner]},
        range(wrappings),
        {"type": "GaussianDpEvent", "noise_multiplier": 5.0},
    )
    path = tmp_path / "privacy_card.json"
    path.write_bytes(sign(built.to_json() | {"events": [{"event": event, "count": 1}]}, KEY))
    with nullcontext() if is_read else pytest.raises(RefusedError, match="nested in more than 18"):
        verify(load(path), tmp_path, key=OWNER)
    with nullcontext() if is_read else pytest.raises(verify_card.BadCardError, match="too deeply"):
        verify_card.load(path)


def _stating_what_it_costs(card: dict[str, Any], events: list[dict[str, Any]], cost: float) -> dict[str, Any]:
    """A card at delta 0 that is consistent but for what its events cost."""
    card["events"] = events
    releases = sum(row["count"] for row in events)
    card["mechanism"] |= {
        "releases": releases,
        "queries": [card["mechanism"]["queries"][0] | {"count": releases}],
    }
    card["accounting"] |= {
        "accountant": "pure",
        "delta": 0.0,
        "epsilon": {"pld": None, "rdp": None, "pure": cost},
        "composition": FIXED,
    }
    card["accounting"]["target"] = {"epsilon": None, "delta": 0.0}
    card["setting"] |= {"epsilon": cost, "delta": 0.0}
    return card


@pytest.mark.parametrize(
    ("event", "cost", "holds"),
    [
        ({"type": "CorrelatedStepDpEvent", "noise_multiplier": 1.0, "parts": 10, "rate": 1.0}, 0.0, False),
        ({"type": "RandomAllocationStepDpEvent", "noise_multiplier": 1.0, "parts": 10}, 0.0, False),
        ({"type": "PureDpEvent", "epsilon": 0.125}, 0.5, True),
        ({"type": "PureDpEvent", "epsilon": 0.125}, 0.125, False),
    ],
    ids=["correlated step", "step of a pass", "pure", "pure, understated"],
)
def test_a_step_that_nothing_has_paid_for_is_no_release_of_epsilon_0(
    event: dict[str, Any], cost: float, holds: bool, built: PrivacyCard, tmp_path: Path
) -> None:
    path = tmp_path / "privacy_card.json"
    card = _stating_what_it_costs(built.to_json(), [{"event": event, "count": 4}], cost)
    path.write_bytes(sign(card, KEY))
    assert both_verdicts(path, OWNER) == (holds, holds)


@pytest.mark.timeout(120)
def test_a_filter_of_an_order_that_nobody_can_sum_up_to_is_refused_by_both(
    built: PrivacyCard, tmp_path: Path
) -> None:
    """A Renyi bound of a sample is a sum of as many terms as its order."""
    document = built.to_json()
    document["accounting"]["composition"] = {"kind": "renyi", "rho": None, "order": 1e15, "limit": 1.0}
    path = tmp_path / "privacy_card.json"
    path.write_bytes(sign(document, KEY))
    assert both_verdicts(path, OWNER) == (False, False)
    with pytest.raises(verify_card.BadCardError, match="order"):
        verify_card.verify(path, key=OWNER)


@pytest.mark.timeout(120)
def test_a_delta_near_the_smallest_number_ends_in_no_bound() -> None:
    """2000 / delta is beyond a float, so that the grid had cells of width 0 and no end."""
    assert lower_bounds([(_poisson(0.1, 1.0), 10)], ADD, 1e-310, 10.0)["pld"] is None


@pytest.mark.usefixtures("bounds_once")
@pytest.mark.parametrize(
    ("pass_", "later"),
    [
        (RandomAllocationDpEvent(1.0, 4, 4), RandomAllocationStepDpEvent(1.0, 4)),
        (CorrelatedDpEvent(1.0, [1.0], [], [], 0, 4, 1.0, 4), CorrelatedStepDpEvent(1.0, 4, 1.0)),
    ],
)
def test_a_pass_that_took_place_no_time_pays_for_nothing(pass_: dp.DpEvent, later: dp.DpEvent) -> None:
    def trial(count: int) -> verify_card.Event:
        rows = [dp.SelfComposedDpEvent(pass_, count), dp.SelfComposedDpEvent(later, 3)]
        return verify_card.Event(event_to_json(dp.ComposedDpEvent(rows)))

    for paid in (verify_card.parts_of(trial(1)), [(trial(1), 1)]):
        verify_card.check_payments(paid)
    for free in (verify_card.parts_of(trial(0)), [(trial(0), 1)]):
        with pytest.raises(verify_card.BadCardError, match="paid for"):
            verify_card.check_payments(free)


def test_a_card_of_seeded_noise_holds_and_promises_nothing(
    folders: Folders, built: PrivacyCard, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = built.to_json()
    document["implementation"]["noise"] = "seeded"
    document["setting"] |= {"guarantee": "seeded", "epsilon": None}
    (tmp_path / "privacy_card.json").write_bytes(sign(document, KEY))
    assert verify_card.main([str(tmp_path)]) == 0
    assert "promises no privacy" in capsys.readouterr().out


def test_it_needs_nothing_of_ours() -> None:
    """It runs with no package that the file's first lines do not name, and where epsilonflow cannot be imported."""
    file = Path(verify_card.__file__)
    names = {
        (name.name if isinstance(node, ast.Import) else str(node.module)).partition(".")[0]
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in node.names
    }
    assert names - sys.stdlib_module_names == {"numpy", "cryptography", "dp_accounting"}
    card = sorted(GOLDEN.glob("card-*.json"))[2]
    blocked = (
        "import sys\nclass Blocked:\n    def find_spec(self, name, path=None, target=None):\n"
        "        if name in ('torch', 'algorithms', 'pydantic', 'pandas', 'pyarrow'): raise ImportError(name)\n"
        "sys.meta_path.insert(0, Blocked())\n"
    )
    run = f"import runpy; sys.argv[1:] = [{str(card)!r}]; runpy.run_path({str(file)!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-I", "-c", blocked + run], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(
        "The card holds. It promises epsilon 3.99999, delta 1e-05, ADD_OR_REMOVE_ONE.\n"
    )


@pytest.mark.usefixtures("bounds_once")
def test_a_fact_that_was_not_signed_is_noticed(built: PrivacyCard, tmp_path: Path) -> None:
    document = built.to_json()
    document["setting"]["title"] = "Another title"
    path = tmp_path / "privacy_card.json"
    path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n")
    failed = [name for name, passed, _ in verify_card.verify(path, key=OWNER) if passed is False]
    assert failed == ["signature"]
    path.write_bytes(built.sign(None).to_bytes())
    assert verify_card.main([str(path)]) == 1
    assert verify_card.main([str(path), "--unsigned"]) == 0

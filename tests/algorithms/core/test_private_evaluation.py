"""The evaluation of held-out records costs no more than training, whatever adds runs up, with the noise it states."""

import math
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import pytest
from scipy import stats

from algorithms.core.calibration import plan_evaluation, plan_renyi, plan_zcdp
from algorithms.core.plan import Plan, Target
from algorithms.core.planning_facts import PlanningFacts
from algorithms.core.private_evaluation import EvaluationPlan, release_evaluation
from algorithms.core.receipt import reserved_events
from algorithms.evaluation import count, histogram_for
from algorithms.evaluation.histogram import HistogramKind
from algorithms.methods import from_settings
from algorithms.privacy.accounting import Budget
from algorithms.privacy.accounting.epsilon import epsilon
from algorithms.privacy.accounting.events import schedule_to_json
from algorithms.privacy.barrier.trace import Trace
from algorithms.privacy.ledger import Composition
from algorithms.privacy.mechanisms.noise import Generator, seeded_generator

NOISES: tuple[Literal["laplace", "gaussian"], ...] = ("laplace", "gaussian")
SPEC = histogram_for("two classes", 2)
FACTS = PlanningFacts(records=4000, parameters=50, layers=1, classes=2)
PLAIN = {"name": "dp_sgd", "expected_batch_size": 100, "steps": 60}
METHODS: dict[str, tuple[dict[str, Any], Target]] = {
    "fixed": (PLAIN, Target(Budget(1.0, 1e-5))),
    "fixed, by RDP": (PLAIN, Target(Budget(1.0, 1e-5), "rdp")),
    "little noise": (PLAIN | {"steps": 2}, Target(Budget(8.0, 1e-5))),
    "full batch": ({"name": "dp_gd", "steps": 20}, Target(Budget(1.0, 1e-5))),
}
FILTERS: dict[str, Callable[[], Plan]] = {
    "zcdp filter": lambda: plan_zcdp(0.02, target=Target(Budget(1.0, 1e-5)), facts=FACTS, steps=9),
    "renyi filter": lambda: plan_renyi(
        16.0, target=Target(Budget(1.0, 1e-5)), facts=FACTS, steps=9, sampling_rate=0.1
    ),
}


def planned(name: str) -> Plan:
    if name in FILTERS:
        return FILTERS[name]()
    settings, target = METHODS[name]
    plan: Plan = from_settings(settings).plan(target, FACTS)
    return plan


@pytest.mark.parametrize("name", [*METHODS, *FILTERS])
def test_an_evaluation_is_free_and_no_noise_is_wasted(name: str) -> None:
    plan = planned(name)
    whole = plan_evaluation(plan, SPEC)
    whole.check()
    assert whole.evaluation is not None
    assert whole.cost == plan.cost
    assert plan.cost.epsilon * (1 - 1e-3) <= whole.evaluation.epsilon <= plan.cost.epsilon
    assert Plan.from_document(whole.to_document()) == whole


def test_its_noise_is_the_gaussian_mechanisms_closed_form() -> None:
    """At delta 1e-5 epsilon 0.5 needs noise 7.0318 (Balle and Wang 2018), times the bound of a person."""
    evaluation = plan_evaluation(planned("fixed"), SPEC, wanted=0.5).evaluation
    assert evaluation is not None
    assert evaluation.noise_multiplier == pytest.approx(7.0318, rel=1e-4)
    assert evaluation.noise_std == pytest.approx(7.0318 * SPEC.sensitivity, rel=1e-4)


@pytest.mark.parametrize(
    "composition", [Composition("renyi", 2.0), Composition("renyi", 16.0), Composition("zcdp")]
)
@pytest.mark.parametrize("name", ["fixed", "little noise", "full batch"])
def test_no_ledger_charges_more_where_the_price_is_bounded(name: str, composition: Composition) -> None:
    plan = planned(name)
    alone = composition.events_price(reserved_events(plan), plan.adjacency, 1)
    whole = plan_evaluation(
        plan,
        SPEC,
        ratios=[lambda one: composition.events_price(schedule_to_json(one), plan.adjacency, 1) / alone],
    )
    assert composition.events_price(reserved_events(whole), plan.adjacency, 1) == pytest.approx(
        alone, rel=1e-9
    )


def test_without_delta_its_noise_is_laplace_on_the_sum_of_absolute_changes() -> None:
    evaluation = EvaluationPlan(SPEC, "laplace", 2.0, 0.5)
    assert epsilon(evaluation.schedule, 0.0, accountant="pure") == pytest.approx(0.5)
    assert evaluation.release.clipping.sensitivity == pytest.approx(5)  # a record is counted in five tables
    assert evaluation.noise_std == pytest.approx(2.0 * 5 * math.sqrt(2), rel=1e-4)


@pytest.mark.parametrize(
    ("kind", "outputs"), [("two classes", 2), ("classes", 7), ("number", 1), ("score", 1)]
)
def test_no_record_changes_the_cells_by_more_than_the_stated_bounds(
    kind: HistogramKind, outputs: int
) -> None:
    rng, spec = np.random.default_rng(3), histogram_for(kind, outputs)
    laplace, gaussian = (EvaluationPlan(spec, noise, 1.0, 1.0).release.clipping for noise in NOISES)
    for _ in range(300):
        if kind in ("number", "score"):
            scores, labels = rng.uniform(-1.2, 1.2, (1, 1)), rng.uniform(-1.2, 1.2, 1)
        else:
            scores, labels = rng.dirichlet(np.full(outputs, 0.2), 1), rng.integers(0, outputs, 1)
        cells = count(spec, scores, labels)
        assert np.abs(cells).sum() <= laplace.sensitivity * (1 + 1e-9)
        assert np.linalg.norm(cells) <= gaussian.sensitivity * (1 + 1e-9)


def _noise(generator: Generator, evaluation: EvaluationPlan, cells: Any) -> Any:
    released = release_evaluation(evaluation, cells, generator=generator, trace=Trace(), step=3)
    return (released.values - cells) / evaluation.noise_std


def test_the_released_noise_has_the_stated_deviation() -> None:
    """Chi-squared over many cells, either way at a chance of 1e-6."""
    spec = histogram_for("classes", 30)
    evaluation = EvaluationPlan(spec, "gaussian", 1.7, 1.0)
    cells = np.random.default_rng(0).uniform(0, 900, spec.cells)
    draws = np.concatenate([_noise(seeded_generator(seed), evaluation, cells) for seed in range(10)])
    tail = stats.chi2.cdf(float(np.square(draws).sum()), len(draws))
    assert 1e-6 < tail < 1 - 1e-6
    assert evaluation.noise_std == pytest.approx(1.7 * spec.sensitivity, rel=1e-4)


def test_its_stream_is_of_no_release_and_no_sample_of_the_run() -> None:
    generator = seeded_generator(4)
    own = generator.evaluation().words(8).tolist()
    others = [generator.stream(release) for release in range(300)]
    others += [stream.of_sample() for stream in others]
    assert all(own != stream.words(8).tolist() for stream in others)
    assert own == generator.evaluation().words(8).tolist()


def test_it_shares_no_noise_with_a_release_of_training() -> None:
    evaluation, generator = EvaluationPlan(SPEC, "gaussian", 2.0, 1.0), seeded_generator(9)
    noise = _noise(generator, evaluation, np.zeros(SPEC.cells))
    for release in range(100):
        of_training = generator.stream(release).normal(SPEC.cells)
        assert np.abs(noise - of_training).max() > 1e-3


def test_the_same_run_repeats_its_noise_and_another_has_its_own() -> None:
    evaluation, cells = EvaluationPlan(SPEC, "gaussian", 2.0, 1.0), np.zeros(SPEC.cells)
    first, again, other = (_noise(seeded_generator(seed), evaluation, cells) for seed in (1, 1, 2))
    assert first.tolist() == again.tolist()
    assert not np.isin(first, other).any()


def test_the_noise_is_added_before_anything_is_rounded_but_to_the_grid() -> None:
    """Released cells are no whole numbers: a rounded metric or count with noise would be."""
    released = release_evaluation(
        EvaluationPlan(SPEC, "gaussian", 2.0, 1.0),
        np.full(SPEC.cells, 7.0),
        generator=seeded_generator(0),
        trace=Trace(),
        step=0,
    )
    assert not np.isclose(released.values % 1.0, 0.0).any()

"""Shrinking a trained classifier towards the class frequencies: its releases, their price, and what is published."""

import itertools
import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import norm
from torch import nn

from algorithms.core.facts_of_models import intercepts_of, number_of
from algorithms.core.optimizers import OptimizerConfig
from algorithms.core.plan import Plan, Target
from algorithms.core.planning_facts import Intercepts, PlanningFacts
from algorithms.core.shrinkage import (
    ClassCounts,
    LabelCounts,
    Shrinkage,
    ShrunkState,
    kept_share,
    plan_shrinkage,
)
from algorithms.fitting import fit
from algorithms.gradients import L2
from algorithms.methods.dp_sgd import DPSGD
from algorithms.models import Model, build
from algorithms.models.cells import behind_cells
from algorithms.models.feature_transforms import install_buffers
from algorithms.models.objectives import with_class_weights
from algorithms.models.scaled_target import TargetScaling, behind_scaling
from algorithms.privacy.accounting import Budget
from algorithms.privacy.card import verify, verify_card
from algorithms.privacy.mechanisms.release import Gaussian, NoNoise
from tests.support import bench
from tests.support.barriers import Free, barrier
from tests.support.bench import MadeUp, made_up, small_model
from tests.support.refusals import refused_as
from tests.support.unaccounted import plan_with

MODEL = small_model("logistic", classes=2)
SHRUNK = DPSGD(steps=4, expected_batch_size=10, shrink_share=0.05)
START, END = torch.zeros(17), torch.linspace(-1.0, 1.0, 17)


def gains(records: MadeUp) -> np.ndarray:
    """By how much the logistic loss is lower at END than at START, of each record, computed by NumPy."""
    features = records.features.reshape(len(records.labels), -1).astype(float)
    scores = features @ END[:16].double().numpy() + float(END[16])
    signs = 2 * records.labels - 1
    return np.log(2.0) - np.logaddexp(0.0, -signs * scores)


@pytest.mark.parametrize("bound", [0.1, 0.5, 100.0])
def test_a_gain_is_the_sum_of_clipped_differences_of_losses(bound: float) -> None:
    records = made_up(70, classes=2)
    answer = barrier(records, MODEL).loss_gain(START, END, bound=L2(bound), noise=NoNoise())
    assert answer == pytest.approx(gains(records).clip(-bound, bound).sum(), rel=1e-5)


@pytest.mark.parametrize(
    ("value", "expected"), [(1e30, 0.5), (-1e30, -0.5), (math.inf, 0.0), (math.nan, 0.0)]
)
def test_no_record_moves_a_gain_by_more_than_its_bound(value: float, expected: float) -> None:
    """However far a loss is from the other one; a record of which one is no number counts as zero."""
    records = made_up(9, classes=2)
    features = np.zeros((1, *records.features.shape[1:]), np.float32)
    features.reshape(-1)[15] = value  # of the largest parameter but the bias
    with_it = MadeUp(np.concatenate([records.features, features]), np.append(records.labels, 1))
    answers = [
        barrier(some, MODEL).loss_gain(START, END, bound=L2(0.5), noise=NoNoise())
        for some in (records, with_it)
    ]
    assert answers[1] - answers[0] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("predicts", ["number", "count"])
def test_no_record_moves_the_gain_of_a_number_by_more_than_its_bound(predicts: str, precision: Any) -> None:
    """Whatever it holds, at the ends of the range and with the smallest scale."""
    draw, odd = np.random.default_rng(0), (1.0, 1e30, -math.inf, math.nan)
    rows, numbers = (draw.uniform(-1, 1, shape).astype(np.float32) for shape in ((9, 6), 9))
    linear = build("linear", input_shape=(6,), classes=1, seed=0, predicts=predicts, precision=precision)
    for centre, end in itertools.product((-1.0, 0.3, 1.0), (0.5, 1e30)):
        known = {"centre": torch.tensor(centre), "scale": torch.tensor(0.02)}
        model = install_buffers(behind_scaling(TargetScaling(), linear), known)
        points = torch.zeros(7), torch.full((7,), end)

        def gain(X: Any, y: Any, model: Model = model, points: Any = points) -> float:
            records = MadeUp(np.asarray(X, np.float32), np.asarray(y, np.float32))  # type: ignore[arg-type]
            return barrier(records, model).loss_gain(*points, bound=L2(0.2), noise=NoNoise())

        without = gain(rows, numbers)
        for feature, label in itertools.product(odd, odd):
            record = [feature, 1.0, feature, 1.0, 0.0, feature]
            with_it = gain([*rows, record], [*numbers, label])
            assert abs(with_it - without) <= 0.2 * (1 + 1e-9), (centre, end, feature, label)


def test_a_gain_has_the_noise_that_is_charged() -> None:
    noise, bound, free = Gaussian(3.0), L2(0.5), Free()
    none = MadeUp(np.zeros((0, 1, 4, 4), np.float32), np.zeros(0, np.int64))
    asked = barrier(none, MODEL, privacy_filter=free)
    answers = np.array([asked.loss_gain(START, END, bound=bound, noise=noise) for _ in range(2000)])
    assert {event.noise_multiplier for event in free.events} == {3.0} and len(free.events) == 2000
    assert answers.std() == pytest.approx(1.5, rel=0.08)  # 5 standard errors


def planned(classes: int, share: float = 0.05, epsilon: float = 1.0, delta: float = 1e-5) -> Shrinkage:
    facts = PlanningFacts(500, 1, 1, classes, intercepts=Intercepts(0, 1, classes, 1.0))
    return plan_shrinkage(share, Target(Budget(epsilon, delta)), facts)


def counts_of(shrinkage: Shrinkage) -> ClassCounts:
    assert isinstance(shrinkage.counts, ClassCounts)
    return shrinkage.counts


@pytest.mark.parametrize(("classes", "of_counts", "bound"), [(2, 0.05, 0.5), (5, 0.1, 1.0), (26, 0.3, 1.0)])
def test_each_release_takes_its_share_of_the_squared_mu(classes: int, of_counts: float, bound: float) -> None:
    """A Gaussian mechanism of mu has delta = Phi(mu/2 - e/mu) - exp(e) Phi(-mu/2 - e/mu) (Balle and Wang 2018)."""
    shrinkage = planned(classes)
    assert shrinkage.bound == bound
    for noise, share in ((counts_of(shrinkage).noise, of_counts), (shrinkage.gain_noise, 0.05)):
        mu = 1.0 / (noise * math.sqrt(share))
        delta = norm.cdf(mu / 2 - 1 / mu) - math.e * norm.cdf(-mu / 2 - 1 / mu)
        assert delta == pytest.approx(1e-5, rel=1e-4)


def test_the_counts_come_first_and_the_gain_last_and_all_cost_the_target() -> None:
    plan = bench.planned(SHRUNK, MODEL, accountant="pld", epsilon=1.0)
    shrinkage, plain = (
        plan.params(Shrinkage),
        bench.planned(DPSGD(steps=4, expected_batch_size=10), MODEL, accountant="pld", epsilon=1.0),
    )
    noises = [getattr(event, "noise_multiplier", None) for event, _ in plan.schedule]
    assert noises == [counts_of(shrinkage).noise, None, shrinkage.gain_noise]
    assert plan.cost.epsilon == pytest.approx(1.0, rel=1e-3)
    assert plan.noise_multiplier > plain.noise_multiplier * 1.005


def final(records: MadeUp, tmp_path: Path, epsilon: float) -> tuple[ShrunkState, Plan]:
    plan = bench.planned(SHRUNK, MODEL, accountant="pld", epsilon=epsilon, records=len(records.labels))
    state = bench.trained(SHRUNK, plan, MODEL, tmp_path, records=lambda: records).state
    assert isinstance(state, ShrunkState)
    return state, plan


def test_without_a_gain_the_released_frequencies_are_published(tmp_path: Path) -> None:
    state, _ = final(made_up(classes=2), tmp_path, 0.2)
    assert float(state.gain) < 0.0 and state.facts["kept"] == 0.0
    published = SHRUNK.released(state)
    assert torch.equal(published, state.start)
    assert not published[:-1].any() and bool(published[-1])


def test_with_a_certain_gain_the_training_is_published_as_it_is(tmp_path: Path) -> None:
    records = made_up(4000, classes=2)
    records = MadeUp(records.features, (records.features[:, 0, 0, 0] > 0).astype(np.int64))
    method = DPSGD(steps=4, expected_batch_size=10, shrink_share=0.05)
    seen = []
    shrunk = ShrunkState.shrunk

    def noting(state: ShrunkState, trained: torch.Tensor, *others: Any) -> ShrunkState:
        seen.append(trained.clone())
        return shrunk(state, trained, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShrunkState, "shrunk", noting)
        state, _ = final(records, tmp_path, 60.0)
    assert state.facts["kept"] == 1.0 and torch.equal(method.released(state), seen[0])


def test_the_start_says_the_frequencies_to_every_record() -> None:
    cells = behind_cells(build("additive", input_shape=(6,), classes=3, seed=0), (2, 3, 1), (0.6, 0.7, 0.3))
    biased = build("softmax", input_shape=(5,), classes=3, seed=0)
    records = MadeUp(np.zeros((60, 3), np.float32), np.repeat([0, 1, 2], (10, 20, 30)))
    for model, width, rows in (
        (cells, 3, [[0.0, 2.0, 0.0], [1.0, 0.0, 0.0]]),
        (biased, 5, [[1.0] * 5, [0.3] * 5]),
    ):
        intercepts = intercepts_of(model, 3)
        assert intercepts is not None
        shrinkage = Shrinkage(1.0, 1.0, ClassCounts(1e-6, 3, intercepts))
        plan = replace(plan_with(1.0, steps=4), method_params=asdict(shrinkage))
        state = SHRUNK.init(model.initial_parameters(), plan)
        assert isinstance(state, ShrunkState)
        asked = barrier(MadeUp(np.zeros((60, width), np.float32), records.labels), model)
        start = state.with_start(plan, asked).start
        outputs = model.outputs(model.by_name(start), torch.tensor(rows))
        assert outputs.softmax(-1).numpy() == pytest.approx(np.tile([1 / 6, 2 / 6, 3 / 6], (2, 1)), abs=1e-4)


@pytest.mark.parametrize("name", ["softmax", "logistic"])
def test_with_class_weights_the_start_is_the_constant_of_the_least_weighted_loss(name: str) -> None:
    """Of 10, 20 and 30 records with weights 1, 2 and 4 the shares are as 10, 40 and 120; of two as 10 and 40."""
    classes = 3 if name == "softmax" else 2
    records = MadeUp(np.zeros((60, 5), np.float32), np.repeat([0, 1, 2], (10, 20, 30)))
    if name == "logistic":
        records = MadeUp(records.features[:30], records.labels[:30])
    model = with_class_weights(
        build(name, input_shape=(5,), classes=classes, seed=0), (1.0, 2.0, 4.0)[:classes]
    )
    intercepts = intercepts_of(model, classes)
    assert intercepts is not None
    shrinkage = Shrinkage(1.0, 1.0, ClassCounts(1e-6, classes, intercepts))
    plan = replace(plan_with(1.0, steps=4), method_params=asdict(shrinkage))
    state = SHRUNK.init(model.initial_parameters(), plan)
    assert isinstance(state, ShrunkState)
    start = state.with_start(plan, barrier(records, model)).start
    outputs = model.outputs(model.by_name(start), torch.ones(1, 5))[0]
    shares = (
        outputs.softmax(-1)
        if name == "softmax"
        else torch.stack([1 - outputs.sigmoid()[0], outputs.sigmoid()[0]])
    )
    expected = [10 / 170, 40 / 170, 120 / 170] if name == "softmax" else [0.2, 0.8]
    assert shares.numpy() == pytest.approx(expected, abs=1e-4)


def weighted_losses(weights: tuple[float, ...], shares: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
    """The mean weighted loss of classes with true shares, [classes], by outputs [classes] or [1]."""
    logits = torch.cat([torch.zeros_like(outputs), outputs]) if len(outputs) == 1 else outputs
    return -(torch.tensor(weights) * shares * logits.log_softmax(0)).sum()


@pytest.mark.parametrize("weights", [(), (0.25, 1.0, 0.5)])
@pytest.mark.parametrize("classes", [2, 3])
def test_the_curvature_is_that_of_the_weighted_loss_at_its_constant(
    classes: int, weights: tuple[float, ...]
) -> None:
    outputs, weights = (1 if classes == 2 else classes), weights[:classes]
    counts = ClassCounts(1e-9, classes, Intercepts(0, 1, outputs, 1.0, weights))
    shares = torch.tensor([0.7, 0.2, 0.1][:classes], dtype=torch.float64)
    shares /= shares.sum()
    at = counts.log_odds(1e6 * shares)

    def loss(point: torch.Tensor) -> torch.Tensor:
        return weighted_losses(weights or (1.0,) * classes, shares, point)

    assert torch.func.grad(loss)(at).numpy() == pytest.approx(0.0, abs=1e-6)
    assert counts.shape(at).curvature == pytest.approx(float(torch.func.hessian(loss)(at).trace()), rel=1e-5)


def test_a_share_is_kept_that_gains_most_where_chance_is_known() -> None:
    """Along the way the gain is a k - b k^2, of which the release says a - b, but for a doubt."""
    for cost, whole in ((9.0, -4.0), (9.0, 6.0), (30.0, -10.0), (30.0, 50.0), (20.0, -25.0)):
        shares = np.linspace(0, 1, 2001)
        best = shares[np.argmax((whole + cost) * shares - cost * shares**2)]
        assert kept_share(whole + 0.25, cost) == pytest.approx(best, abs=5e-3)
    chances = norm.rvs(
        size=4000, random_state=0
    )  # of gains that say nothing, where noise costs next to nothing
    assert np.mean([kept_share(gain, 1e-6) ** 2 for gain in chances]) < 0.2


@pytest.mark.parametrize("schedule", ["constant", "linear"])
def test_how_far_steps_move_is_what_the_optimizer_does(schedule: Any) -> None:
    """A constant gradient moves a parameter by the sum of all moves, but for what momentum has not finished."""
    update = OptimizerConfig(learning_rate=0.2, momentum=0.9, schedule=schedule)
    state = update.start(torch.zeros(1))
    for _ in range(400):
        state = update.apply(state, torch.ones(1), steps=400)
    assert -float(state.parameters) == pytest.approx(sum(update.moves(400)), rel=0.06)


def test_records_that_were_learned_by_heart_gain_by_chance_alone(tmp_path: Path) -> None:
    """Each of 300 records has a label by a coin, and eight categories as frequent as 1, 1/2, 1/3 and so on."""
    draw, n, (columns, of_each) = np.random.default_rng(0), 300, (8, 12)
    shares = 1.0 / np.arange(1, of_each + 1)
    cells = draw.choice(of_each, (n, columns), p=shares / shares.sum()).astype(np.float32)
    records = MadeUp(np.c_[cells, np.zeros(n, np.float32)], draw.integers(0, 2, n))
    model = build("additive", input_shape=(columns * of_each + 1,), classes=2, seed=0)
    weights = (*[math.sqrt(0.9 / columns)] * columns, math.sqrt(0.1))
    model = behind_cells(model, (*[of_each] * columns, 1), weights)
    limited = OptimizerConfig(learning_rate=3.8, momentum=0.9, schedule="linear", noise_limit=0.5)
    kept = {}
    for name, update in (
        ("known", limited),
        ("not known", replace(limited, noise_limit=None, learning_rate=0.1)),
    ):
        method = DPSGD(steps=60, expected_batch_size=60, shrink_share=0.05, update=update)
        classes = 2
        facts = PlanningFacts(n, model.parameter_count, 1, classes, intercepts=intercepts_of(model, classes))
        plan = method.plan(Target(Budget(20.0, 1e-5)), facts)
        state = bench.trained(method, plan, model, tmp_path / name, records=lambda: records).state
        assert isinstance(state, ShrunkState)
        kept[name] = state.facts
    assert kept["not known"]["kept"] > 0.9 and kept["known"]["kept"] < 0.15, kept


def test_the_counts_of_labels_are_one_release_of_all() -> None:
    """A record has one 1 for each label, so that two records differ by a norm of sqrt(labels) from none."""
    draw, labels = np.random.default_rng(0), 3
    given = (draw.random((200, labels)) < (0.5, 0.1, 0.9)).astype(np.float32)
    records = MadeUp(draw.normal(size=(200, 5)).astype(np.float32), given)  # type: ignore[arg-type]
    model = build("linear", input_shape=(5,), classes=labels, seed=0, predicts="labels")
    intercepts = intercepts_of(model, 0)
    assert intercepts == Intercepts(15, 1, labels, 1.0, of_labels=True)
    target, facts = Target(Budget(1.0, 1e-5)), PlanningFacts(200, 18, 1, 1, intercepts=intercepts)
    shrinkage = SHRUNK.plan(target, facts).params(Shrinkage)
    counts = shrinkage.counts
    assert isinstance(counts, LabelCounts)
    assert counts.release.clipping == L2(math.sqrt(labels))
    for one in given:
        assert float(counts.count(torch.from_numpy(one)).norm()) == pytest.approx(math.sqrt(labels))
    quiet = Shrinkage(1.0, 1.0, LabelCounts(1e-6, labels, intercepts))
    plan = replace(plan_with(1.0, steps=4), method_params=asdict(quiet))
    state = SHRUNK.init(model.initial_parameters(), plan)
    assert isinstance(state, ShrunkState)
    start = state.with_start(plan, barrier(records, model)).start
    said = model.outputs(model.by_name(start), torch.ones(1, 5))[0].sigmoid()
    assert said.numpy() == pytest.approx(given.mean(axis=0), abs=1e-4)


@pytest.mark.parametrize("value", [0.0, 1.0, 0.5, -1e30, math.inf, math.nan])
def test_no_record_moves_the_counts_of_labels_by_more_than_their_bound(value: float) -> None:
    draw, labels = np.random.default_rng(0), 3
    given = draw.integers(0, 2, (30, labels)).astype(np.float32)
    rows, odd = np.zeros((31, 5), np.float32), np.full((1, labels), value, np.float32)
    model = build("linear", input_shape=(5,), classes=labels, seed=0, predicts="labels")
    counts = LabelCounts(1.0, labels, Intercepts(15, 1, labels, 1.0, of_labels=True))
    bound = counts.release.clipping
    assert isinstance(bound, L2)
    without, with_it = (
        barrier(MadeUp(rows[: len(some)], some), model).total(  # type: ignore[arg-type]
            lambda _record, label: counts.count(label), bound=bound, noise=NoNoise()
        )
        for some in (given, np.concatenate([given, odd]))
    )
    assert float((with_it - without).norm()) <= math.sqrt(labels) * (1 + 1e-6)


def test_only_linear_classifiers_have_intercepts() -> None:
    three = {"input_shape": (4,), "seed": 0}
    assert intercepts_of(build("logistic", classes=2, **three), 2) == Intercepts(4, 1, 1, 1.0)  # type: ignore[arg-type]
    assert intercepts_of(build("softmax", classes=3, **three), 3) == Intercepts(12, 1, 3, 1.0)  # type: ignore[arg-type]
    others: list[Model] = [
        build("mlp", classes=3, settings={"hidden": 4}, **three),  # type: ignore[arg-type]
        build("svm", classes=2, **three),  # type: ignore[arg-type]
        build("logistic_through_origin", classes=2, **three),  # type: ignore[arg-type]
        behind_cells(build("additive", input_shape=(5,), classes=3, seed=0), (2, 3), (0.6, 0.8)),
    ]
    assert [intercepts_of(model, 2 if "logistic" in model.name else 3) for model in others] == [None] * 4
    target, facts = Target(Budget(1.0, 1e-5)), PlanningFacts(500, 10, 1, 3)
    with refused_as("nothing_to_shrink_to"):
        SHRUNK.plan(target, facts)


@pytest.mark.parametrize(("kind", "bound"), [("number", 0.2), ("count", 0.7), ("quantile", None)])
def test_a_number_is_shrunk_towards_its_released_centre(kind: str, bound: float | None) -> None:
    """By the gain alone, as its centre is a release before the training; a quantile is not its centre."""
    linear = build("additive", input_shape=(6,), classes=1, seed=0, predicts=kind)
    scaled = behind_scaling(TargetScaling(), behind_cells(linear, (2, 4), (0.6, 0.8)))
    target, facts = Target(Budget(1.0, 1e-5)), PlanningFacts(500, 6, 1, 1, number=number_of(scaled))
    if bound is None:
        with refused_as("nothing_to_shrink_to"):
            SHRUNK.plan(target, facts)
        return
    plan = SHRUNK.plan(target, facts)
    shrinkage = plan.params(Shrinkage)
    assert (shrinkage.bound, shrinkage.counts) == (bound, None)
    noises = [getattr(event, "noise_multiplier", None) for event, _ in plan.schedule]
    assert noises == [None, shrinkage.gain_noise]
    assert plan.cost.epsilon == pytest.approx(1.0, rel=1e-3)
    others = (
        linear,
        behind_scaling(
            TargetScaling(),
            build("mlp", input_shape=(6,), classes=1, seed=0, predicts=kind, settings={"hidden": 4}),
        ),
    )
    assert [number_of(other) for other in others] == [None, None]


@pytest.mark.parametrize(("classes", "share"), [(2, 0.5), (3, 0.34)])
def test_a_share_that_leaves_nothing_to_the_training_is_refused(classes: int, share: float) -> None:
    with refused_as("shrink_share_too_large", share=share):
        planned(classes, share)
    assert planned(classes, share - 0.02)


@pytest.mark.parametrize(
    ("width", "losses"),
    [
        (3, ("cross_entropy", nn.CrossEntropyLoss(), nn.CrossEntropyLoss(reduction="none"))),
        (1, ("binary_cross_entropy_with_logits", nn.BCEWithLogitsLoss())),
    ],
)
def test_a_loss_as_an_object_is_shrunk_as_its_function_is(width: int, losses: tuple[Any, ...]) -> None:
    draw = np.random.default_rng(0)
    X, y = draw.normal(size=(80, 4)).astype(np.float32), draw.integers(0, max(2, width), 80)
    module = nn.Linear(4, width)
    asked: dict[str, Any] = {
        "method": SHRUNK,
        "epsilon": 1.0,
        "delta": 1e-5,
        "noise": "seeded",
        "public": True,
    }
    found = [fit(module, loss, X, y, **asked).model.weight for loss in losses]
    assert all(torch.equal(one, found[0]) for one in found)


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(label_smoothing=0.1),
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 1.0]), reduction="none"),
        nn.CrossEntropyLoss(ignore_index=0, reduction="none"),
    ],
)
def test_a_loss_with_settings_of_its_own_has_other_frequencies(loss: nn.Module) -> None:
    draw = np.random.default_rng(0)
    X, y = draw.normal(size=(80, 4)).astype(np.float32), draw.integers(0, 3, 80)
    with refused_as("nothing_to_shrink_to"):
        fit(nn.Linear(4, 3), loss, X, y, method=SHRUNK, epsilon=1.0, delta=1e-5)


@pytest.mark.parametrize("is_number", [False, True], ids=["classes", "number"])
def test_both_verifiers_recompute_the_price_of_a_shrunk_fit_from_its_card(
    tmp_path: Path, is_number: bool
) -> None:
    """And one that lacks the gain's event, or has less noise in it, passes neither."""
    draw = np.random.default_rng(0)
    X, y = draw.normal(size=(200, 4)).astype(np.float32), draw.integers(0, 2, 200)
    method = DPSGD(steps=3, expected_batch_size=20, shrink_share=0.05)
    module, loss, target = nn.Linear(4, 2), "cross_entropy", {}
    if is_number:
        module, loss, target = nn.Linear(4, 1), "mse_loss", {"target_scale": 0.05}
        y = y.astype(np.float32)
        for part in module.parameters():
            nn.init.zeros_(part)
    result = fit(module, loss, X, y, method=method, epsilon=1.0, delta=1e-5, **target)
    kinds = list(result.trace["kind"])
    before = ["total", "total"] if is_number else ["total"]  # the histogram and the mean, or the counts
    assert kinds == [*before, "gradient", "gradient", "gradient", "total"]
    assert verify(result.card, unsigned=True).passed
    path = tmp_path / "card.json"
    path.write_bytes(result.card.to_bytes())
    assert all(check[1] is not False for check in verify_card.verify(path, unsigned=True))
    for fault in ("missing", "quieter"):
        document = json.loads(path.read_text())
        events = document["events"]
        if fault == "missing":
            del events[-1]
        else:
            events[-1]["event"]["noise_multiplier"] /= 4
        other = tmp_path / f"{fault}.json"
        other.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n")
        assert [check for check in verify_card.verify(other, unsigned=True) if check[1] is False], fault

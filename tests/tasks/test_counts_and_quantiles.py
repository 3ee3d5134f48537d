"""Counts and quantiles as targets: their losses, and from a data card to a page and predictions."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from ruamel.yaml import YAML
from sklearn.metrics import d2_pinball_score, d2_tweedie_score, mean_pinball_loss, mean_poisson_deviance

from algorithms.core.planning_facts import Inputs, PlanningFacts
from algorithms.models import build
from algorithms.models.number_losses import CountLoss, QuantileLoss
from algorithms.models.saved import load as load_model
from data.card import DataCard
from data.prepared import load as load_prepared
from data.targets import Number, Quantile
from epsilonflow.sklearn import DPRegressor, load
from tasks.calibrate import histogram_of
from tasks.config.new_project import of_number, table_of
from tasks.config.overrides import recipe
from tasks.config.params import ParamsRefusedError
from tasks.export import export
from tasks.predict import predict
from tasks.prediction_passes import record_scores
from tasks.runs.metrics import metric_rows, report_text
from tests.support.cards import card, category, csv_of, label, number
from tests.support.metrics import metrics_of
from tests.support.own_records import declared as declared
from tests.support.own_records import finish
from tests.support.refusals import refused_as
from tests.support.workspace import Workspace

__all__ = ["declared"]
LOSSES = [CountLoss(), QuantileLoss(0.9), QuantileLoss(0.5)]


def with_scale(output: torch.Tensor, centre: float, scale: float) -> torch.Tensor:
    beside = torch.zeros_like(output)
    return torch.stack([output, beside + centre, beside + scale], dim=-1)


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_losses_have_no_more_than_their_stated_slope_and_curvature(loss: Any) -> None:
    outputs = torch.linspace(-8.0, 8.0, 4001, dtype=torch.float64).requires_grad_(True)
    kind = "count" if isinstance(loss, CountLoss) else "quantile"
    bounds = build("linear", input_shape=(2,), classes=1, seed=0, predicts=kind, level=0.9).bounds
    assert bounds is not None
    for centre, scale in ((-0.98, 0.02), (-0.9, 0.3), (0.0, 1.0), (0.5, 0.05)):
        for target in (-1.0, -0.95, 0.1, 1.0):
            labels = torch.full((4001,), target, dtype=torch.float64)
            value = loss(with_scale(outputs, centre, scale), labels)
            assert value.min() >= -1e-9
            (slope,) = torch.autograd.grad(value.sum(), outputs)
            bends = slope.diff() / outputs.detach().diff()
            # convex, and no more bent
            assert bends.min() >= -1e-6 and bends.max() <= bounds.curvature * (1 + 1e-2)
            assert slope.abs().max() <= bounds.slope


def test_methods_that_do_not_clip_take_quantiles_and_refuse_counts_by_their_name() -> None:
    def gradient_norm(kind: str) -> float:
        bounds = build("linear", input_shape=(2,), classes=1, seed=0, predicts=kind, level=0.9).bounds
        facts = PlanningFacts(100, 3, 1, 1, inputs=Inputs(1.0, 2.0), loss=bounds)
        return facts.gradient_norm(2)

    assert gradient_norm("quantile") == pytest.approx(0.9 * 2.0)
    with refused_as("slope_unbounded"):
        gradient_norm("count")


def test_the_poisson_loss_is_that_of_scikit_learn_below_its_bend() -> None:
    draw = np.random.default_rng(0)
    counts, outputs = draw.poisson(3.0, 50).astype(float), draw.uniform(-3.0, 1.0, 50)
    high, mean, scale = 40.0, 3.0, 1.0  # the centre is the mean, and the scale is half of the range
    parts = with_scale(torch.tensor(outputs), 2 * mean / high - 1, scale)
    rates = mean * np.exp(outputs)
    below = counts <= np.e * mean  # above, the least value is that of another rate
    ours = CountLoss()(parts, torch.tensor(2 * counts / high - 1)).numpy() * (scale / 2) * high
    assert 2 * ours[below].mean() == pytest.approx(mean_poisson_deviance(counts[below], rates[below]))
    shown = (CountLoss().scores(parts)[:, 0].numpy() + 1) / 2 * high
    assert shown == pytest.approx(rates)


@pytest.mark.parametrize("shift", [0.2, 1.0, 4.0])
def test_the_best_constant_rate_is_the_mean_also_beyond_the_bend(shift: float) -> None:
    counts = torch.from_numpy(np.random.default_rng(1).poisson(4.0, 4000).astype(float))
    output = torch.tensor(0.0, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([output], max_iter=200, line_search_fn="strong_wolfe")

    def parts() -> torch.Tensor:
        return with_scale(output.expand(len(counts)), 2 * shift / 50.0 - 1, 0.3)

    def close() -> torch.Tensor:
        optimizer.zero_grad()
        loss = CountLoss()(parts(), 2 * counts / 50.0 - 1).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimizer.step(close)
    rate = (float(CountLoss().scores(parts())[0, 0].detach()) + 1) / 2 * 50.0
    assert rate == pytest.approx(float(counts.mean()), rel=1e-4)


def test_the_best_constant_of_the_pinball_loss_is_nearly_the_quantile() -> None:
    numbers = torch.from_numpy(np.random.default_rng(2).normal(0.0, 1.0, 20_000))
    candidates = torch.linspace(0.5, 2.5, 401, dtype=torch.float64)
    means = [QuantileLoss(0.9)(one.expand(20_000, 1), numbers).mean() for one in candidates]
    best = float(candidates[int(torch.stack(means).argmin())])
    assert best == pytest.approx(1.2816, abs=0.03)  # the normal quantile


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ({"bounds": [1.0, 9.0], "counts": True}, "counts begin at 0"),
        ({"bounds": [0.0, 9.0], "counts": False}, "counts"),
        ({"bounds": [0.0, 9.0], "quantile": 1.0}, "quantile"),
        ({"bounds": [0.0, 9.0], "quantile": 0.5, "counts": True}, "quantile"),
    ],
)
def test_targets_that_do_not_fit_are_refused(target: dict[str, Any], words: str) -> None:
    document = card(
        "mine",
        records={"at_most": 100},
        target=target,
        reader=csv_of(number("x", 0, 1), label("y")),
        split={"salt": "x", "test_fraction": 0.2},
        files={"train": {"path": "x.csv", "keyed_sha256": "0" * 64}},
    )
    with pytest.raises(ValueError, match=words):
        DataCard.model_validate_json(json.dumps(document))


@pytest.mark.parametrize(
    ("predicts", "counts", "quantile", "options"),
    [
        ({"classes": ["a", "b"]}, True, None, ("--counts",)),
        ({"target": {"labels": ["a", "b"]}}, False, 0.5, ("--quantile",)),
        ({"target": {"bounds": [0.0, 1.0]}}, True, 0.5, ("--counts", "--quantile")),
        ({"target": {"bounds": [0.0, 1.0]}}, False, 90.0, ("--quantile",)),
    ],
)
def test_options_of_init_that_do_not_fit_are_refused(
    predicts: dict[str, Any], counts: bool, quantile: float | None, options: tuple[str, ...]
) -> None:
    with refused_as("bad_option", ParamsRefusedError, options=options):
        of_number(predicts, counts=counts, quantile=quantile)


def test_init_declares_counts_and_quantiles() -> None:
    of = {"target": {"bounds": [0.0, 1.0]}}
    assert of_number(of, counts=True, quantile=None)["target"] == {"bounds": [0.0, 1.0], "counts": True}
    assert of_number(of, counts=False, quantile=0.9)["target"] == {"bounds": [0.0, 1.0], "quantile": 0.9}
    assert of_number(of, counts=False, quantile=None) == of


@pytest.mark.parametrize(
    ("statistic", "finest"),
    [({}, 1024), ({"counts": True}, 64), ({"quantile": 0.9}, 64), ({"labels": ["a", "b"]}, 64)],
)
def test_init_has_the_finest_grid_for_the_mean_of_a_number_alone(
    statistic: dict[str, Any], finest: int
) -> None:
    """Trees split by its counts there; the others have no histograms."""
    reader = table_of([number("x", 0, 1)], None, {"target": {"bounds": [0.0, 1.0]} | statistic}, {}, 40_000)
    assert max(reader["cells"]["grids"]) == finest


def table(path: Path) -> pd.DataFrame:
    draw = np.random.default_rng(3)
    frame = pd.DataFrame({"x": draw.random(1500).round(3), "kind": draw.choice(["old", "new"], 1500)})
    frame["visits"] = draw.poisson(np.exp(2.5 * frame["x"] - 0.5 * (frame["kind"] == "old"))).clip(0, 60)
    frame.to_csv(path, index=False)
    return frame


@pytest.mark.usefixtures("same_secrets")
@pytest.mark.parametrize(
    ("target", "holdout"),
    [({"counts": True}, "public"), ({"quantile": 0.8}, "public"), ({"counts": True}, "private")],
    ids=["counts", "quantile", "counts of private people"],
)
def test_a_table_goes_from_its_card_to_a_page_and_predictions(
    workspace: Workspace, declared: Callable[..., None], target: dict[str, Any], holdout: str
) -> None:
    frame = table(workspace.root / "visits.csv")
    reader = csv_of(number("x", 0, 1), category("kind", "old", "new"), label("visits"))
    keys = {
        "reader": reader | {"cells": {"grids": [4], "trees": 4}},
        "classes": [],
        "target": {"bounds": [0.0, 60.0]} | target,
        "records": {"at_most": 1500},
        "holdout": holdout,
    }
    declared("visits.csv", model={"name": "additive"}, **keys)
    advised = recipe(DataCard.model_validate_json(json.dumps(card_of(workspace))), "dp_sgd", 3.0)
    assert advised.features["name"] == "target_scale"
    workspace.replace("features", advised.features)
    workspace.replace("algorithm", {"name": "dp_sgd", **advised.settings, "steps": 40})
    finish(workspace)
    metrics, model = metrics_of(workspace), load_model(workspace.root / "artifacts")
    page = (workspace.root / "artifacts/report.html").read_text()
    batches = predict(model, workspace.root / "visits.csv")
    numbers = np.array([one for some in batches for one in some.predicted], float)
    assert np.corrcoef(numbers, frame["x"])[0, 1] > 0.5 and numbers.min() >= 0 and numbers.max() <= 60
    assert load(workspace.root / "artifacts").predict(frame[["x", "kind"]]) == pytest.approx(
        numbers, rel=1e-4, abs=1e-5
    )
    if holdout == "private":
        assert set(metrics) >= {"test_r2", "evaluation_epsilon"}
        return
    held = load_prepared(workspace.root / "datasets/prepared")
    real = (np.array(held.test_labels, float) + 1) * 30
    with torch.no_grad():
        found = (model(torch.from_numpy(np.array(held.test_features)))[:, 0].double().numpy() + 1) * 30
    found = found.clip(0, 60)
    if "counts" in target:
        assert metrics["test_d2"] == pytest.approx(d2_tweedie_score(real, found, power=1))
        assert metrics["test_deviance"] == pytest.approx(mean_poisson_deviance(real, found))
        assert "Poisson deviance" in page and metrics["test_d2"] > 0.1
    else:
        assert metrics["test_pinball_loss"] == pytest.approx(mean_pinball_loss(real, found, alpha=0.8))
        assert metrics["test_pinball_explained"] == pytest.approx(
            d2_pinball_score(real, found, alpha=0.8), abs=0.02
        )
        assert metrics["test_coverage"] == (real <= found).mean() and "pinball loss" in page
        assert 0.6 < metrics["test_coverage"] < 0.95 and metrics["test_pinball_explained"] > 0
        export(workspace.root / "artifacts", "torchscript", workspace.root / "model.pt")


def test_a_private_quantile_is_scored_by_its_pinball_loss() -> None:
    target = Quantile(bounds=(0.0, 10.0), quantile=0.8)
    assert histogram_of(target).kind == "score" and histogram_of(Number(bounds=(0.0, 1.0))).kind == "number"
    scores, labels = torch.tensor([[0.5], [0.5], [-1.0]]), torch.tensor([1.0, 0.0, 1.0])
    pinball = np.array([0.8 * 0.5, 0.2 * 0.5, 0.8 * 2.0])
    assert record_scores(target, scores, labels).numpy() == pytest.approx(1 - pinball / 1.6)


def card_of(workspace: Workspace) -> dict[str, Any]:
    found: dict[str, Any] = YAML(typ="safe").load(workspace.root / "data/cards/mine.yaml")
    return found


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ({"test_d2": -0.1, "test_deviance": 2.2, "mean_deviance": 2.0, "test_rmse": 1.0}, "worse than"),
        (
            {"test_pinball_explained": -0.1, "test_pinball_loss": 1.0, "constant_pinball_loss": 0.9},
            "worse than",
        ),
        (
            {"test_pinball_explained": 0.1, "test_pinball_loss": 0.8, "constant_pinball_loss": 0.9},
            "better than",
        ),
    ],
)
def test_a_model_that_is_worse_than_a_constant_is_called_so(metrics: dict[str, float], words: str) -> None:
    metrics = {"test_mae": 1.0, "mean_rmse": 1.0, "test_coverage": 0.9, "level": 0.9} | metrics
    assert any(words in value for _, value in metric_rows(metrics))
    warning = report_text(metrics, 100, 0.5).warning
    assert (warning is None) == (words == "better than") and words in f"{warning}better than"


@pytest.mark.usefixtures("same_secrets")
def test_estimators_take_the_losses() -> None:
    draw = np.random.default_rng(4)
    X = draw.uniform(0, 1, size=(2000, 2))
    y = draw.poisson(1 + 8 * X[:, 0])
    common = {"epsilon": 8, "bounds": (0, 1), "target_bounds": (0, 40), "steps": 40}
    mean = DPRegressor(loss="poisson", **common).fit(X, y).predict(X)
    high = DPRegressor(loss="quantile", quantile=0.9, **common).fit(X, y).predict(X)
    # 40 steps end 0.47 above, with a deviation of 0.07 between fits; a constant of no use is 5 off.
    assert abs(mean.mean() - y.mean()) < 0.9 and np.corrcoef(mean, X[:, 0])[0, 1] > 0.8
    assert 0.8 < (y <= high).mean() < 0.98
    for wrong, arguments in (
        ({"loss": "poison"}, ("loss",)),
        ({"loss": "quantile", "quantile": 90}, ("quantile",)),
        ({"loss": "poisson", "target_bounds": (1, 40)}, ("target_bounds", "loss")),
    ):
        with refused_as("bad_argument", arguments=arguments):
            DPRegressor(**(common | wrong)).fit(X, y)

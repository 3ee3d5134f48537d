"""Shape functions of an additive model: what the model itself computes, and by how much noise moves them."""

import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from pydantic import TypeAdapter

from algorithms.core.optimizers import OptimizerConfig
from algorithms.models.saved import load
from data.card import DataCard
from data.formats import Column
from data.preparation import reader_in
from data.readers import encoding as rows
from tasks.config.overrides import recipe
from tasks.reporting.column_summaries import summaries_of
from tasks.reporting.figures import LIGHT, png, shape_figure
from tasks.reporting.shapes import Shape, explanation_of, in_units, optimizer_in, parameter_noise
from tests.support.cards import category, csv_of, label, number
from tests.support.own_records import CARD, finish
from tests.support.own_records import declared as declared
from tests.support.workspace import Workspace

__all__ = ["declared"]
COLUMNS = [number("size", 0, 100) | {"missing": 50.0}, category("kind", "old", "<new>")]


def table(path: Path) -> None:
    draw = np.random.default_rng(0)
    size, kind = draw.lognormal(2.5, 1, 800).clip(0, 100).round(2), draw.choice(["old", "<new>"], 800)
    price = (np.log1p(size) + 0.3 * draw.normal(size=800)).round(3)
    pd.DataFrame(
        {"size": size, "kind": kind, "price": price, "big": np.where(price > 2.5, "yes", "no")}
    ).to_csv(path, index=False)


TARGETS: dict[str, dict[str, Any]] = {
    "price": {"target": {"bounds": [0.0, 6.0]}, "classes": []},
    "big": {"classes": ["no", "yes"]},
}


@pytest.mark.usefixtures("same_secrets")
@pytest.mark.parametrize(
    ("name", "of_histograms"), [("price", {}), ("big", {}), ("price", {"trees": 0, "learns_finest": False})]
)
def test_differences_of_a_shape_are_those_of_the_models_predictions(
    workspace: Workspace, declared: Callable[..., None], name: str, of_histograms: dict[str, Any]
) -> None:
    table(workspace.root / "sizes.csv")
    other = next(one for one in TARGETS if one != name)
    reader = csv_of(*COLUMNS, label(name), {"name": other, "kind": "ignored"})
    reader["cells"] = {"grids": [4, 16], "trees": 0}  # without trees, a column's shape is all that it does
    keys = {"reader": reader, "records": {"at_most": 800}, **TARGETS[name]}
    declared("sizes.csv", model={"name": "additive"}, **keys)
    card = CARD | keys | {"files": {"train": {"path": "sizes.csv", "keyed_sha256": "0" * 64}}}
    advised = recipe(DataCard.model_validate_json(json.dumps(card)), "dp_sgd", 3.0)
    workspace.replace(
        "features", {"name": "histograms"} | of_histograms if of_histograms else advised.features
    )
    workspace.replace("algorithm", {"name": "dp_sgd", **advised.settings, "steps": 30})
    finish(workspace)
    artifacts = workspace.root / "artifacts"
    settings = json.loads((artifacts / "plan.json").read_text())["settings"]
    trace = pd.read_parquet(artifacts / "trace.parquet")
    explanation = explanation_of(artifacts / "model.safetensors", optimizer_in(settings), trace)
    assert explanation is not None
    size, kind = explanation.shapes
    assert (size.name, kind.name) == ("size", "kind") and not size.is_noise

    model = load(artifacts)
    known = reader_in(model.preparation)
    frame = pd.DataFrame({"size": [1.0, 80.0, 1.0], "kind": ["old", "old", "<new>"]})
    import pyarrow as pa

    features = rows.features(pa.Table.from_pandas(frame, preserve_index=False), known, "X")  # type: ignore[arg-type]
    with torch.no_grad():
        scores = model(torch.from_numpy(np.ascontiguousarray(features, np.float32))).double().numpy()
    outputs = scores[:, 1] - scores[:, 0] if name == "big" else 3.0 * scores[:, 0]  # half of the range is 3
    assert size.numbers is not None
    places = [int(np.abs(size.numbers - one).argmin()) for one in (1.0, 80.0)]
    by_shape = size.effects[places[1], 0] - size.effects[places[0], 0]
    assert by_shape == pytest.approx(outputs[1] - outputs[0], rel=1e-3) and by_shape > 0.1
    assert kind.effects[1, 0] - kind.effects[0, 0] == pytest.approx(
        outputs[2] - outputs[0], rel=1e-3, abs=1e-5
    )

    update = OptimizerConfig(**settings["update"])
    of_a_step = float(trace["noise_std"].iloc[-1] / trace["divisor"].iloc[-1])
    noise = update.noise_limit if update.factor_for(of_a_step, 30) < 1 else None
    assert size.deviation is not None and kind.deviation is not None
    if noise is not None and name == "big":
        # a column has half of the square
        assert kind.deviation == pytest.approx(noise * np.sqrt(0.5), rel=1e-3)
    page = (artifacts / "report.html").read_text()
    assert "What the model says of each column" in page and "&lt;new&gt;" in page and "<new>" not in page
    assert page.count("what it adds to the") == 2
    summaries = summaries_of(artifacts / "model.safetensors", trace)
    has_histograms = bool(of_histograms) or "histograms" in str(advised.features)
    assert [row.name for row in summaries] == (["size", "kind"] if has_histograms else [])
    assert ("What was released of each column" in page) == has_histograms
    if of_histograms:
        low, high = (float(end) for end in summaries[0].interval.split(" to "))
        assert low <= float(summaries[0].middle) <= high
        assert low <= pd.read_csv(workspace.root / "sizes.csv")["size"].median() <= high < 100


def test_noise_moves_a_parameter_as_far_as_the_page_says() -> None:
    update, steps = OptimizerConfig(0.5, momentum=0.5, schedule="linear", noise_limit=100.0), 40
    draw = torch.Generator().manual_seed(0)
    trace = pd.DataFrame(
        {"kind": "gradient", "noise": "gaussian", "noise_std": 3.0, "divisor": 10.0}, index=range(steps)
    )
    # As it is, and as where the clip norm falls to a third after ten steps; the limit binds before that alone.
    falling = trace.assign(noise_std=[3.0] * 10 + [1.0] * 30)
    # Then what momentum still holds takes steps that are twice as long: of an early step's noise at most a tenth more.
    for table_of_steps, limit, most in ((trace, 100.0, 1.02), (falling, 100.0, 1.02), (falling, 0.5, 1.1)):
        limited = replace(update, noise_limit=limit)
        state = limited.start(torch.zeros(4000))
        for noise in table_of_steps["noise_std"] / table_of_steps["divisor"]:
            gradient = noise * torch.randn(4000, generator=draw)
            state = limited.apply(state, gradient, steps=steps, factor=limited.factor_for(noise, steps))
        said, measured = parameter_noise(limited, table_of_steps), float(state.parameters.std())
        # Momentum still holds some of the last steps' noise back, so it is a little less.
        assert said is not None and 0.85 * said < measured < most * said
    others: tuple[dict[str, Any], ...] = ({"averaging": "ema"}, {"weight_decay": 0.1}, {"optimizer": "adam"})
    for other in others:
        assert parameter_noise(replace(update, noise_limit=None, **other), trace) is None
    assert parameter_noise(update, trace.assign(noise="correlated")) is None
    assert parameter_noise(None, trace) is None


def test_optimizer_of_a_plan_is_read_where_it_is_stated() -> None:
    update = {"learning_rate": 0.5, "momentum": 0.5, "schedule": "linear"}
    expected = OptimizerConfig(0.5, momentum=0.5, schedule="linear")
    assert optimizer_in({"steps": 3, "update": update}) == expected
    for settings in ({}, {"update": None}, {"update": {"of my own": 1}}, {"update": "fast"}):
        assert optimizer_in(settings) is None


@pytest.mark.parametrize("count", [20, 300])
@pytest.mark.parametrize("signal", [0.0, 5.0])
def test_what_noise_alone_often_makes_is_called_so(signal: float, count: int) -> None:
    draw, calls = np.random.default_rng(0), []
    for _ in range(200):
        effects = draw.normal(size=(count, 1)) + signal * np.linspace(-1, 1, count)[:, None]
        calls.append(Shape("x", ("v",) * count, None, effects, effects[0], 1.0).is_noise)
    assert np.mean(calls) > 0.8 if signal == 0.0 else np.mean(calls) == 0.0


def test_of_very_many_categories_those_farthest_from_0_are_drawn() -> None:
    effects = np.zeros((300, 1))
    effects[[7, 290], 0] = 2.0, -3.0
    shape = Shape("city", tuple(f"c{index}" for index in range(300)), None, effects, effects[0], 0.1)
    figure = shape_figure(shape, ("yes",), unit="log-odds", theme=LIGHT)
    (points,) = (line for line in figure.axes[0].lines if line.get_marker() == "o")
    drawn = np.asarray(points.get_ydata())
    assert len(drawn) == 30 and sorted(drawn)[0] == -3.0 and sorted(drawn)[-1] == 2.0
    assert (
        figure.axes[0].get_xticklabels()[-1].get_text() == "c290"
        and "30 of 300" in figure.axes[0].get_xlabel()
    )


def test_days_of_a_shape_are_dates() -> None:
    columns: list[Column] = TypeAdapter(list[Column]).validate_json(
        json.dumps([{"name": "when", "kind": "timestamp", "bounds": ["2020-01-01", "2020-12-31"]}])
    )
    elapsed = columns[0].parts[-1]
    assert [in_units(columns[0], elapsed, share) for share in (0.0, 1.0)] == ["2020-01-01", "2020-12-31"]


def test_names_that_the_font_lacks_are_drawn_without_a_word_on_the_terminal() -> None:
    shape = Shape("\u90fd\u5e02", ("\u6771\u4eac", "K\u00f6ln"), None, np.eye(2)[:, :1], np.zeros(1), None)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert png(shape_figure(shape, ("yes",), unit="log-odds", theme=LIGHT)).startswith(b"\x89PNG")
    assert not said


def test_models_that_are_not_additive_have_no_shapes(workspace: Workspace) -> None:
    workspace.train()
    trace = pd.read_parquet(workspace.root / "artifacts/trace.parquet")
    assert explanation_of(workspace.root / "artifacts/model.safetensors", None, trace) is None


@pytest.mark.parametrize(
    ("features", "is_shown"),
    [({"trees": 8}, True), ({"trees": 12, "depth": 5}, True), ({"bins": 15, "trees": 7}, False)],
)
def test_a_model_whose_columns_have_other_cells_has_no_shapes_even_with_as_many_cells(
    workspace: Workspace, declared: Callable[..., None], features: dict[str, Any], is_shown: bool
) -> None:
    """16 cells of bins stand for the leaves of a tree; bins share the weight of their column."""
    table(workspace.root / "sizes.csv")
    reader = csv_of(*COLUMNS, label("big"), {"name": "price", "kind": "ignored"})
    reader["cells"] = {"grids": [4, 16], "trees": 8}
    declared(
        "sizes.csv", model={"name": "additive"}, reader=reader, records={"at_most": 800}, **TARGETS["big"]
    )
    workspace.replace("features", {"name": "histograms"} | features)
    workspace.train()
    trace = pd.read_parquet(workspace.root / "artifacts/trace.parquet")
    explanation = explanation_of(workspace.root / "artifacts/model.safetensors", None, trace)
    assert (explanation is not None) is is_shown

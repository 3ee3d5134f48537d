"""Changes to params.yaml that a person or a deployment requests, and recipes from recipes.yaml.

A recipe is the model and the settings that suit a data set and an algorithm. Changes are made in the file, so that DVC
sees them. The file keeps its comments, and the whole result is checked before anything is written.
"""

import io
import json
import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedSeq
from ruamel.yaml.nodes import ScalarNode
from ruamel.yaml.representer import RoundTripRepresenter

from algorithms.lazy_imports import lazy_module
from data.card import DataCard, DataRefusedError, RecordCounts, data_card
from data.description import cells_of, feature_norms
from data.documents import Document, DocumentError, load_yaml
from data.files import write_text
from data.formats import Table
from data.targets import Number, level_of
from tasks.config import params
from tasks.config.params import ModelParams, Params, ParamsRefusedError
from tasks.config.temporary_params import undo_change

if TYPE_CHECKING:
    from algorithms.core.method import PaperSwitch
    from algorithms.models import Model
    from algorithms.models.outlines import LinearOutline
    from algorithms.noise_limits import OutputKind
    from algorithms.privacy.accounting import gaussian
else:
    gaussian = lazy_module("algorithms.privacy.accounting.gaussian")  # it imports SciPy

RECIPES = Path(__file__).with_name("recipes.yaml")
_SMALLEST_SIDE = 20
_MAX_BATCH = 8192
"""For a data set without a recipe: with so many records, larger batches cost time and gain little."""
_NOISE_OF_A_STEP = 65.0
"""Norm of the noise in a batch's mean, in clip norms, times records epsilon / sqrt(parameters): 300 steps, delta
1e-5.
"""
_NOISE_TAKEN = {"tables": 0.1, "images": 0.2, "texts": 0.3}
"""How far the noise of a step may move the parameters; docs/results/defaults.md has the results."""
_NOISE_OF_ALL_STEPS = 0.7
"""How far the noise of all steps may move a parameter, if records are unit vectors; comparisons/results/tables.md."""
_BOUND_OF_RECORDS = 3.0
"""How many times larger than the records a bound on their number is taken to be, where more noise is worth less."""
_REPLACED = 2.0
"""How many times its bound a record can change a sum where it may be replaced, as if there were as many times fewer."""
_CLIP_OF_TWO_CLASSES = 0.8
"""The clip norm of unit vectors with two classes, whose gradients are as long as an error, at most 1."""
_DEVIATIONS_FOR_HISTOGRAMS = 40.0
"""How many standard deviations of a count the records have to be, for histograms; ten times as many where only an upper
bound on their number is public; comparisons/results/tables.md."""
_MANY_TREES, _RECORDS_FOR_MANY_TREES, _INFORMATION_FOR_MANY_TREES = 128, 20_000, 6000.0
"""More trees, split by content, from so many records, and records in standard deviations of a count, on."""
_FINE_GRID, _VERY_FINE_GRID = 256, 1024
"""From so many cells on, a number's finest grid is for its histogram alone, which counts each cell where there are very
many trees, else as many cells as a fine grid has."""
_VERY_MANY_TREES, _INFORMATION_FOR_VERY_MANY_TREES = 256, 15_000.0
_DEEP_TREES, _INFORMATION_FOR_DEEP_TREES, _VERY_DEEP_TREES = 5, 10_000.0, 6
"""Deeper ones, if there are many, and still deeper ones, if there are very many that split by very many cells."""
_MAX_RATE = 8.0
_EXCLUSIVE_SETTINGS = (("expected_batch_size", "sampling_rate"), ("norm_noise", "norm_noise_multiplier"))
"""Pairs of settings of which only one may be given."""


@dataclass(frozen=True)
class Recipe:
    """A recipe.

    model: its name. settings: of the algorithm, without `name`. of_model: further keys of the model's group. encoder,
    features: the groups of params.yaml; encoder is None for untransformed records.
    """

    model: str
    settings: Document
    of_model: Document = field(default_factory=dict)
    encoder: Document | None = None
    features: Document = field(default_factory=lambda: {"name": "none"})


def recipe(card: DataCard, algorithm: str, epsilon: float, *, by_numbers: bool = False) -> Recipe:
    """The recipe of a data set for an algorithm.

    If the file has no recipe, or `by_numbers` ignores it, the recipe follows from the kind of data, public numbers and
    epsilon. An algorithm that the file does not contain gets no settings; its catalogue decides whether it exists.
    """
    if not card.input_shape:
        raise DataRefusedError(
            "the records of {dataset!r} are texts that only an encoder can take; name one: --encoder wordllama.",
            code="encoder_needed",
            dataset=card.name,
        )
    recipes = _load_recipes()
    entry = recipes.get(card.name, {}).get(algorithm)
    if entry and not by_numbers:
        return Recipe(entry["model"], entry["settings"])
    usual, model = recipes["default"].get(algorithm, {"settings": {}}), _model_for(card)
    settings = _with_batches(usual["settings"] | usual.get(_kind(card), {}), card.records)
    if _kind(card) == "cells" and "sampling_rate" in settings and card.records.at_most is not None:
        settings["sampling_rate"] = min(
            settings["sampling_rate"], float(f"{_MAX_BATCH / card.records.at_most:.2g}")
        )
    settings = _with_learning_rate(settings, card, model, epsilon)
    left_open = {name for name, value in usual.get("cells", {}).items() if value is None}
    if _kind(card) == "cells" and left_open:
        settings |= _settings_by_noise(left_open, card, model, epsilon, settings.get("momentum", 0.0))
    if "noise_limit" in settings.get("update", {}) and isinstance(card.label_type, Number):
        share = settings.get("shrink_share")
        return Recipe(model, settings, features=_features_of_a_number(card, epsilon, of_mean=share))
    return Recipe(model, settings)


def encoder_recipe(card: DataCard, encoder: str, algorithm: str, epsilon: float) -> Recipe:
    """The recipe for an encoder: a linear head on its features, which are centred by a private mean.

    For a tokenizer it is the public model that the tokenizer belongs to, with adapters. If the file gives several
    learning rates, the rate is interpolated by epsilon: the less noise a step has, the larger the rate. Of few records
    it is lowered by a limit on how far all noise together moves an output, and classifiers are shrunk towards the class
    frequencies, as for tables.
    """
    recipes = _load_recipes()["encoders"]
    kind, _, public = encoder.partition("/")
    entry = {**recipes["default"], **recipes.get(kind if kind == "tokenizer" else encoder, {})}
    usual = entry["algorithms"].get(algorithm)
    settings = dict(
        _load_recipes()["default"].get(algorithm, {"settings": {}})["settings"] if usual is None else usual
    )
    if "learning_rates" in settings:
        # torch, which takes seconds to import
        from algorithms.models.bounds import SQUARED_ERROR
        from algorithms.models.networks import UnitSettings
        from tasks.config.step_sizes import stable_rate

        rates = {
            float(at_epsilon): float(rate) for at_epsilon, rate in settings.pop("learning_rates").items()
        }
        epsilons = sorted(rates)
        # Linear in log epsilon, and constant beyond the ends.
        rate = np.interp(
            math.log(epsilon),
            [math.log(step) for step in epsilons],
            [rates[step] for step in epsilons],
        )
        if entry["model"] == "unit_linear" and isinstance(card.label_type, Number):
            norm = math.hypot(1.0, UnitSettings().bias)
            momentum = settings.get("update", {}).get("momentum", 0.0)
            rate = np.minimum(rate, stable_rate(SQUARED_ERROR, norm, momentum))
        update = settings.get("update", {}) | {"learning_rate": float(f"{rate:.2g}")}
        if entry["model"] == "unit_linear" and not isinstance(card.label_type, Number):
            # Records are unit vectors, as rows of cells are, and outputs the log-odds of classes.
            from algorithms.noise_limits import noise_limit_of_features, shrink_share

            known = _records_by_noise(card, bound=_BOUND_OF_RECORDS)
            update["noise_limit"] = noise_limit_of_features(known, epsilon)
            if card.label_type.kind == "class":
                settings["shrink_share"] = shrink_share(known, epsilon, of_features=True)
        settings["update"] = update
    return Recipe(
        entry["model"],
        _with_batches(settings, card.records),
        {"checkpoint": public, "adapter": {}} if kind == "tokenizer" else {},
        {"name": encoder, "settings": entry.get("settings", {})},
        entry["features"],
    )


def explain_recipe(card: DataCard, advised: Recipe) -> dict[str, str]:
    """The reasons for the settings of a recipe from public numbers, one sentence each."""
    if advised.encoder is not None:
        return _reasons_of_encoder(card, advised)
    records, kind = card.records.train or card.records.at_most, _kind(card)
    batch = advised.settings.get("expected_batch_size")
    size = (
        f"a tenth of the {records:,} records, at most {_MAX_BATCH:,}" if records else "a tenth of the records"
    )
    bound = "small, as images and texts gain by it" if kind != "tables" else "1, as for most tables"
    if kind == "cells":
        return _reasons_of_cells(card, advised, size)
    falls = advised.settings.get("update", {}).get("schedule") != "constant"
    stays = "" if falls else f", at most {_MAX_RATE:g}, at which it stays"
    stable = ""
    if kind == "tables" and isinstance(card.label_type, Number):
        stable = ", and at most half of the rate at which the squared error could diverge"
    predicted = f"the target of {card.target.kind}" if card.target else f"{len(card.classes)} classes"
    return {
        "model": f"the usual one for {kind} of shape {list(card.input_shape)} and {predicted}",
        **({"batch size": f"{size}: larger ones gain little and cost time"} if batch else {}),
        "steps": "300: enough for large batches, and noise grows only by the root of their number",
        "clip norm": f"{bound}; with the learning rate it only sets the length of a step",
        "learning rate": f"as long as the noise of a step lets it be: by {_NOISE_TAKEN[kind]:g}"
        + stays
        + stable,
    }


def _reasons_of_encoder(card: DataCard, advised: Recipe) -> dict[str, str]:
    usual, update = "the usual one for this encoder", advised.settings["update"]
    is_head = advised.model == "unit_linear"
    model = "a linear head on the features of the frozen encoder, which cost nothing"
    rate = "the less noise a step has, the larger"
    if is_head and isinstance(card.label_type, Number):
        rate += ", and at most half of the rate at which the squared error could diverge"
    if "noise_limit" in update:
        rate += f", less where all noise together would move an output by more than {update['noise_limit']:g}"
    centred = f"their mean, by a release of noise multiplier {advised.features.get('mean_noise', 0.0):g}"
    return {
        "model": model if is_head else "the public model of the tokenizer, trained through adapters",
        ("batch size" if "expected_batch_size" in advised.settings else "sampling rate"): usual,
        "steps": usual,
        "clip norm": f"{usual}; with the learning rate it only sets the length of a step",
        "learning rate": rate,
        **({"features": centred} if advised.features["name"] == "centred" else {}),
        **_reasons_of_shrinkage(card, advised),
    }


def _features_of_a_number(card: DataCard, epsilon: float, *, of_mean: float | None) -> Document:
    """The centre and scale of the number, released before training; with all histograms where records are enough.

    of_mean: the share of its mean, towards which a model is shrunk; None for no such release.
    """
    noise = float(f"{gaussian.noise_for_share(gaussian.SHARE_OF_FEATURES, epsilon):.3g}")
    encoding = card.reader.cell_encoding if isinstance(card.reader, Table) else None
    assert encoding is not None
    of_a_count = noise * math.sqrt(1 + sum(len(column.parts) for column in encoding.histograms))
    records = _records_by_noise(card, bound=10.0)
    has_enough = card.label_type.kind == "number" and records >= _DEVIATIONS_FOR_HISTOGRAMS * of_a_count
    mean: Document = {}
    if of_mean is not None:
        mean = {"mean_noise": float(f"{gaussian.noise_for_share(of_mean, epsilon):.3g}")}
    if not has_enough:
        from algorithms.noise_limits import target_share

        share = target_share(_records_by_noise(card, bound=_BOUND_OF_RECORDS), epsilon)
        noise = float(f"{gaussian.noise_for_share(share, epsilon):.3g}")
        return {"name": "target_scale", "noise": noise, **mean}
    finest = max(encoding.settings.grids)
    trees = _trees_by_histograms(card, epsilon, is_very_fine=finest >= _VERY_FINE_GRID)
    counted: Document = {"learns_finest": False} if finest >= _FINE_GRID else {}
    counts_all = trees.get("trees") == _VERY_MANY_TREES
    if finest > _FINE_GRID and finest % _FINE_GRID == 0 and not counts_all:
        counted["merged_cells"] = finest // _FINE_GRID
    return {"name": "histograms", "noise": noise, **trees, **counted, **mean}


def _trees_by_histograms(card: DataCard, epsilon: float, *, is_very_fine: bool) -> Document:
    """The trees where histograms are released: with more to learn from, more and deeper ones, split by content.

    is_very_fine: whether very many cells of a number are counted, if there are very many trees.
    """
    records = _records_by_noise(card, bound=_BOUND_OF_RECORDS)
    information = records / gaussian.noise_for_share(1.0, epsilon)
    if records < _RECORDS_FOR_MANY_TREES or information < _INFORMATION_FOR_MANY_TREES:
        return {}
    if information >= _INFORMATION_FOR_VERY_MANY_TREES:
        depth = _VERY_DEEP_TREES if is_very_fine else _DEEP_TREES
        return {"splits": "by_content", "trees": _VERY_MANY_TREES, "depth": depth}
    trees: Document = {"splits": "by_content", "trees": _MANY_TREES}
    return trees | ({"depth": _DEEP_TREES} if information >= _INFORMATION_FOR_DEEP_TREES else {})


def _reasons_of_cells(card: DataCard, advised: Recipe, size: str) -> dict[str, str]:
    cells = cells_of(card)
    assert cells is not None
    settings = advised.settings
    has_batch = "expected_batch_size" in settings
    limit = settings.get("update", {}).get("noise_limit", _NOISE_OF_ALL_STEPS)
    momentum = {
        "momentum": "of classes more, the more records there are for the budget, so that steps go as far as their"
        " noise lets them"
    }
    falls = ""
    if "error_share" in settings:
        falls = (
            f"; six times {settings['error_share']:.2%} of the squared mu of the budget says how far errors have"
            " fallen, and it falls with them"
        )
    loss = {
        "number": "the squared error",
        "count": "the Poisson loss",
        "quantile": "the rounded pinball loss",
        "labels": "the loss of the labels",
    }.get(card.label_type.kind, "the loss")
    return {
        "model": f"a number for each of the table's {cells.total:,} cells, of which a row activates {len(cells.sizes)}",
        ("batch size" if has_batch else "sampling rate"): f"{size}: larger ones gain little and cost time",
        "steps": "300: enough for large batches, and noise grows only by the root of their number",
        "clip norm": f"{settings.get('clip_norm', 1.0):g}, which few gradients of unit vectors exceed{falls}",
        "learning rate": f"half of the rate at which {loss} could diverge, less where all noise together would move a"
        f" parameter by more than {limit:g}",
        **(momentum if card.label_type.kind == "class" else {}),
        **_reasons_of_features(advised.features["name"]),
        **_reasons_of_shrinkage(card, advised),
    }


def _reasons_of_features(name: str) -> dict[str, str]:
    share = f"{gaussian.SHARE_OF_FEATURES:.0%} of the squared mu of the budget"
    if name == "histograms":
        enough = f"{_DEVIATIONS_FOR_HISTOGRAMS:g} standard deviations of a count"
        return {
            "features": f"{share}: the number's scale, and trees that split where records are, which are {enough};"
            " with many records for the budget more and deeper ones, and more splits of columns that say more"
        }
    if name != "target_scale":
        return {}
    return {
        "features": f"{share}, of few records up to twice as much: the centre and the scale of the number"
    }


def _reasons_of_shrinkage(card: DataCard, advised: Recipe) -> dict[str, str]:
    share = advised.settings.get("shrink_share")
    if share is None:
        return {}
    has_labels = card.label_type.kind == "labels"
    if card.target is not None and not has_labels:
        return {
            "shrinkage": f"{share:.2%} of the squared mu of the budget says the number's mean, and as much how far the"
            " training gains on it; the less certain the gain is, the nearer the model is to the mean"
        }
    from algorithms.core.shrinkage import share_of_counts  # torch, which takes seconds to import

    what = "labels" if has_labels else "classes"
    of_counts = share_of_counts(share, len(card.classes), of_labels=has_labels)
    return {
        "shrinkage": f"{of_counts:.2%} of the squared mu of the budget says how frequent the"
        f" {what} are, and {share:.2%} how much the training gains on that; the less certain the gain is, the nearer"
        " the model is to the frequencies"
    }


@lru_cache(maxsize=1)
def _load_recipes() -> Document:
    recipes: Document = YAML(typ="safe", pure=True).load(RECIPES)
    return recipes


def _model_for(card: DataCard) -> str:
    if card.tokens is not None:
        return "bilstm"
    if len(card.input_shape) == 3 and min(card.input_shape[1:]) >= _SMALLEST_SIDE:
        return "tanh_cnn"
    if cells_of(card) is not None:
        return "additive"
    if card.target is not None:
        return "linear"
    return "logistic" if len(card.classes) == 2 and len(card.input_shape) == 1 else "softmax"


def _kind(card: DataCard) -> str:
    if card.tokens is not None:
        return "texts"
    if cells_of(card) is not None:
        return "cells"
    return "images" if len(card.input_shape) == 3 else "tables"


def _with_batches(settings: Document, records: RecordCounts) -> Document:
    """Replace a share of the records by a batch size; an algorithm without privacy has no sampling rate."""
    of = {"sampling_rate": records.train, "batch_share": records.train or records.at_most}
    share = next((name for name in of if name in settings and of[name] is not None), None)
    if share is None:
        return settings
    others = {key: value for key, value in settings.items() if key != share}
    batch = min(_MAX_BATCH, max(1, round(settings[share] * (of[share] or 1))))
    return {"expected_batch_size": batch, **others}


def _with_learning_rate(settings: Document, card: DataCard, model: str, epsilon: float) -> Document:
    """Set a learning rate if the file leaves it open: the less noise a step has, the larger the rate.

    If a network for images may use the largest rate, the rate stays constant, since a falling rate only shortens the
    distance that the steps can cover.
    """
    update = settings.get("update", {})
    if update.get("learning_rate", 0.0) is not None:
        return settings
    from algorithms.noise_limits import (
        CLIP_OF_COUNTS,
        error_share,
        shrink_share,
        usual_momentum,
        usual_noise_limit,
    )
    from tasks.config.step_sizes import diverges, stable_rate

    records = _records_by_noise(card)
    known = _records_by_noise(card, bound=_BOUND_OF_RECORDS)
    cells = cells_of(card)
    # Cells: rows are vectors of a known norm, so that the loss's curvature says how large a rate is stable, and the
    # method itself lowers it to `noise_limit` by the noise that it plans.
    if cells is not None and "noise_limit" in update and card.label_type.kind == "class":
        update = update | {"momentum": usual_momentum(known, epsilon, settings["steps"])}
    momentum = update.get("momentum", 0.0)
    can_follow = {name for name in ("shrink_share", "error_share") if name in settings}
    settings = {name: value for name, value in settings.items() if name not in can_follow}
    chosen_model = _model_of(model, card, card.input_shape if cells is None else (cells.total,))
    if cells is not None:
        if card.label_type.kind == "labels" and chosen_model.bounds is not None and "clip_norm" in settings:
            # Gradients are no longer than the slope of their mean loss, and noise is drawn for the clip norm.
            settings = settings | {"clip_norm": float(f"{chosen_model.bounds.slope:.4g}")}
        clips = "clip_norm" in settings and "noise_limit" in update
        if card.label_type.kind == "class" and len(card.classes) == 2 and clips:
            settings = settings | {"clip_norm": _CLIP_OF_TWO_CLASSES}
        if card.label_type.kind == "count" and clips:
            settings = settings | {"clip_norm": CLIP_OF_COUNTS}
        rate = stable_rate(chosen_model.bounds, cells.norms[1], momentum)
        if "noise_limit" not in update:  # of a method that cannot keep to it by the noise that it plans
            of_a_step = _NOISE_OF_A_STEP * settings.get("clip_norm", 1.0) / (records * epsilon)
            moved = of_a_step * math.sqrt(settings.get("steps", 300) / 3.0) / (1.0 - momentum)
            rate = min(rate, _NOISE_OF_ALL_STEPS / moved)
        update = update | {"learning_rate": float(f"{rate:.2g}")}
        is_number = isinstance(card.label_type, Number)
        if "noise_limit" in update and (is_number or card.label_type.kind in ("class", "labels")):
            kind: OutputKind = "number" if is_number else "classes"
            # Frequencies need a cell that all rows share, and a quantile is not what is released.
            can_shrink = card.label_type.kind != "quantile" if is_number else cells.sizes[-1] == 1
            share = shrink_share(known, epsilon) if can_shrink and "shrink_share" in can_follow else None
            update["noise_limit"] = usual_noise_limit(known, epsilon, kind, is_shrunk=share is not None)
            if share is not None:
                settings = settings | {"shrink_share": share}
            of_errors = error_share(known, epsilon) if card.label_type.kind == "number" else None
            if of_errors is not None and "error_share" in can_follow:
                settings = settings | {"error_share": of_errors}
        return settings | {"update": update}
    # Other data: a step's noise has this norm in clip norms, so that the rate that is taken moves parameters by
    # `_NOISE_TAKEN` a step.
    noise = _NOISE_OF_A_STEP * math.sqrt(chosen_model.parameter_count) / (records * epsilon)
    rate = min(_MAX_RATE, _NOISE_TAKEN[_kind(card)] / (noise * settings.get("clip_norm", 1.0)))
    if diverges(chosen_model.bounds):
        norm = math.hypot(feature_norms(card)[1], 1.0)  # with the bias's constant
        rate = min(rate, stable_rate(chosen_model.bounds, norm, momentum))
    chosen: Document = {"learning_rate": float(f"{rate:.2g}")}
    if rate == _MAX_RATE and model == "tanh_cnn" and "schedule" in update:
        chosen["schedule"] = "constant"
    return settings | {"update": update | chosen}


def _settings_by_noise(
    left_open: Collection[str], card: DataCard, model: str, epsilon: float, momentum: float
) -> Document:
    """What methods with public bounds on gradients leave open for rows of norm 1: how far their noise may go.

    It moves what is said of a row by at most a limit, however many cells there are. Steps with a constant learning rate
    may only be so long together as that allows.

    left_open: the names of the settings.
    """
    from algorithms.noise_limits import usual_noise_limit  # torch, which takes seconds to import
    from tasks.config.step_sizes import heavy_ball_path, nesterov_path

    cells, known = cells_of(card), _records_by_noise(card, bound=_BOUND_OF_RECORDS)
    assert cells is not None
    if "noise_limit" in left_open:
        return {"noise_limit": usual_noise_limit(known, epsilon, "classes")}
    if "steps" not in left_open:
        return {}
    bounds, known = _model_of(model, card, (cells.total,)).bounds, known / _REPLACED
    length = usual_noise_limit(known, epsilon, "classes") * known / gaussian.noise_for_share(1.0, epsilon)
    if "regularisation" in left_open:
        return nesterov_path(bounds, length)
    return heavy_ball_path(bounds, length, momentum)


def _model_of(name: str, card: DataCard, shape: tuple[int, ...]) -> "LinearOutline | Model":
    """The model of the catalogue for a card, which is built only if it has no outline."""
    target, classes = card.label_type, card.label_type.outputs(card.tokens)
    if card.tokens is None:
        from algorithms.models.outlines import outline_of

        outline = outline_of(name, input_shape=shape, classes=classes, predicts=target.kind)
        if outline is not None:
            return outline
    from algorithms.models import build  # torch, which takes seconds to import

    return build(
        name,
        input_shape=shape,
        classes=classes,
        seed=0,
        tokens=card.tokens,
        predicts=target.kind,
        level=level_of(target),
    )


def _records_by_noise(card: DataCard, bound: float = 1.0) -> float:
    """The records over the records of a person whom group privacy protects, as the noise is that many times larger.

    bound: how many times larger than the records a bound on their number is taken to be.
    """
    records = card.records.train or (card.records.at_most or 1) / bound
    return records / (1 if card.person is None else card.person.group)


@dataclass(frozen=True)
class ParamOverrides:
    """Requested changes; None leaves a value unchanged.

    dataset: also sets the model and the algorithm's settings by its recipe. algorithm: sets them, too, by the recipe of
    the current data set. settings: values by dotted key, such as {"algorithm.steps": 100}, which are set last; of two
    exclusive settings, such as a batch size and a sampling rate, the one that is named here replaces the other. A
    setting that makes a paper's choices, such as algorithm.paper_budget, replaces what the recipe has chosen there.
    """

    dataset: str | None = None
    algorithm: str | None = None
    epsilon: float | None = None
    delta: float | None = None
    seed: int | None = None
    settings: Document = field(default_factory=dict)
    encoder: str | None = None

    @property
    def are_none(self) -> bool:
        """Whether nothing is requested."""
        return self == ParamOverrides()


@dataclass(frozen=True)
class ParamsEdit:
    """params.yaml before and after a change, and its new content."""

    path: Path
    before: str
    after: str
    params: Params

    @property
    def changes(self) -> bool:
        """Whether any value differs."""
        return self.after != self.before

    def write(self) -> None:
        """Write the new text, whole or not at all."""
        write_text(self.path, self.after)

    def undo(self) -> None:
        """Undo the change; lines that somebody has changed since stay."""
        write_text(self.path, undo_change(self.path.read_text(encoding="utf-8"), self.after, self.before))


def settings_of(assignments: Iterable[str]) -> Document:
    """Parse texts such as "privacy.delta=1e-6" into dotted keys and values, which are read as YAML.

    Raises ParamsRefusedError for any other text.
    """
    settings = {}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if not equals or not key.strip(" ."):
            raise ParamsRefusedError(
                "--set takes key=value, such as privacy.delta=1e-6, not {assignment!r}.",
                code="bad_option",
                assignment=assignment,
                options=("--set",),
            )
        try:
            settings[key.strip()] = _plain(value)
        except DocumentError:
            raise ParamsRefusedError(
                "the value of --set {key} is not valid YAML: {value!r}; put it in quotes.",
                code="bad_option",
                key=key,
                value=value,
                options=("--set",),
            ) from None
    return settings


def params_edit(root: Path, overrides: ParamOverrides) -> ParamsEdit:
    """Apply `overrides` to params.yaml in `root` without writing it.

    Raises ParamsRefusedError, DataRefusedError for an unknown data set, and RefusedError for an unknown algorithm.
    """
    path = root / "params.yaml"
    params.load(path, reads=())
    before = path.read_text(encoding="utf-8")
    document = _yaml().load(before)
    unchanged, method = _text(document), value_at(document, "algorithm.name")
    _change(document, overrides, cards=root / "data" / "cards")
    text = _text(document)
    after = before
    if text != unchanged:  # blank lines within a multi-line value stay
        after = spaced if _plain(spaced := _restore_spacing(text)) == _plain(text) else text
    name = "params.yaml" if after == before else "params.yaml with what was asked"
    if overrides.algorithm is None:
        _refuse_settings_of_another_method(document, overrides, former=method)
    parsed = params.parse(_plain(after), name=name)
    data_card(parsed.data.dataset, root / "data" / "cards")
    return ParamsEdit(path, before, after, parsed)


def _change(document: Document, overrides: ParamOverrides, *, cards: Path) -> None:
    document.setdefault("features", {"name": "none"})  # a group that DVC tracks must exist
    named = {"data.dataset": overrides.dataset, "privacy.epsilon": overrides.epsilon}
    named |= {"privacy.delta": overrides.delta, "model.seed": overrides.seed}
    wanted = {key: value for key, value in named.items() if value is not None}
    if overrides.dataset not in (None, value_at(document, "data.dataset")) and value_at(
        document, "data.blocks"
    ):
        _set(document, "data.blocks", [])  # the names are those of the previous data set
    follows_recipe = (overrides.dataset, overrides.algorithm, overrides.encoder) != (None, None, None)
    changes_method = follows_recipe or any(key.startswith("algorithm") for key in overrides.settings)
    # In this order: a recipe replaces what was there, and explicit settings what the recipe has set. Then a paper's
    # protocol decides what nobody has asked for, and rivals of what was asked for go.
    before = _paper_switch_on(document) if changes_method else None
    for key, value in wanted.items():
        _set(document, key, value)
    if follows_recipe:
        epsilon = overrides.settings.get("privacy.epsilon", value_at(document, "privacy.epsilon"))
        _follow_recipe(document, overrides, epsilon, cards=cards)
    for key, value in overrides.settings.items():
        _set(document, key, value)
    if changes_method:
        _keep_paper_settings(document, overrides, before=before)
    for pair in _EXCLUSIVE_SETTINGS:
        for name, other in (pair, pair[::-1]):
            is_set = overrides.settings.get(f"algorithm.{name}") is not None
            if is_set and f"algorithm.{other}" not in overrides.settings:
                document["algorithm"].pop(other, None)


def _refuse_settings_of_another_method(document: Document, overrides: ParamOverrides, *, former: Any) -> None:
    """Refuse a method that was named as a setting, without a recipe, if the former method's settings do not fit it."""
    name = overrides.settings.get("algorithm.name")
    if name in (None, former):
        return
    from algorithms.methods import CATALOGUE  # imports torch, which takes seconds

    kind: Any = CATALOGUE.get(str(name))
    if kind is None:  # `params.parse` refuses it, or it is code of the user's own
        return
    overridden = {key.split(".")[1] for key in overrides.settings if key.startswith("algorithm.")}
    foreign = (
        document["algorithm"].keys() - {setting.name for setting in fields(kind)} - overridden - {"name"}
    )
    if foreign:
        raise ParamsRefusedError(
            "algorithm.name={name} keeps the settings of {former}, and {name} has no {foreign};"
            " choose it by --algorithm {name}, which replaces them by its recipe.",
            code="bad_keys",
            name=name,
            former=former,
            foreign=", ".join(sorted(foreign)),
            keys=("algorithm.name",),
        )


def _paper_switch_on(document: Document) -> "PaperSwitch | None":
    """The switch of the document's method, such as paper_budget, if it is on."""
    from algorithms.methods import CATALOGUE  # imports torch, which takes seconds

    kind = CATALOGUE.get(str(value_at(document, "algorithm.name")))
    switch: PaperSwitch | None = getattr(kind, "paper_switch", None)
    is_on = switch is not None and value_at(document, f"algorithm.{switch.name}") == switch.value
    return switch if is_on else None


def _keep_paper_settings(
    document: Document, overrides: ParamOverrides, *, before: "PaperSwitch | None"
) -> None:
    """Let a paper's protocol decide its settings: what a recipe has set of them, and nobody asks for, becomes the
    paper's.

    before: the switch that was on before the changes; a recipe for another data set leaves it on.
    """
    overridden = {key.removeprefix("algorithm.") for key in overrides.settings}
    if before is not None and overrides.algorithm is None and before.name not in overridden:
        document["algorithm"][before.name] = before.value
    follows_recipe = (overrides.dataset, overrides.algorithm, overrides.encoder) != (None, None, None)
    switch = _paper_switch_on(document)
    if switch is not None and (follows_recipe or switch.name in overridden):
        chosen = switch.settings.keys() & document["algorithm"].keys() - overridden
        document["algorithm"].update({name: switch.settings[name] for name in sorted(chosen)})


def _follow_recipe(document: Document, overrides: ParamOverrides, epsilon: Any, *, cards: Path) -> None:
    """Apply the recipe. epsilon: of the run; the final check refuses it if it is not a positive number."""
    current = params.parse(document, reads=("data", "model"))
    name = overrides.algorithm or value_at(document, "algorithm.name")
    usable = isinstance(epsilon, int | float) and 0 < epsilon < math.inf
    card, aim = data_card(current.data.dataset, cards), epsilon if usable else 1.0
    if overrides.encoder is None:
        chosen = recipe(card, str(name), aim)
    else:
        chosen = encoder_recipe(card, overrides.encoder, str(name), aim)
    unchanged = {key: getattr(current.model, key) for key in ("seed", "precision")}
    if overrides.dataset is None:
        unchanged["class_weights"] = current.model.class_weights
    _update_in_place(
        document["model"], ModelParams(name=chosen.model, **unchanged, **chosen.of_model).model_dump()
    )
    _update_in_place(document["algorithm"], {"name": name, **chosen.settings})
    # A recipe is for untransformed records, or for the output of the encoder.
    if chosen.encoder or "transform" in document["data"]:
        _set(document, "data.transform", "encoder" if chosen.encoder else "none")
    if chosen.encoder or "encoder" in document["data"]:
        document["data"]["encoder"] = chosen.encoder
    _update_in_place(document["features"], chosen.features)


def _update_in_place(target: Document, values: Document) -> None:
    """Give a mapping these values in place, so that the remaining keys keep their comments."""
    for key in [key for key in target if key not in values]:
        del target[key]
    for key, value in values.items():
        if isinstance(value, dict) and value and isinstance(target.get(key), dict):
            _update_in_place(target[key], value)
        elif key not in target or target[key] != value:
            target[key] = _in_line(value)


def with_values(document: Document, values: Document) -> Document:
    """A copy of a document of plain values with these set at dotted keys; missing outer keys are created."""
    changed: Document = json.loads(json.dumps(document))
    for key, value in values.items():
        *outer, last = key.split(".")
        group = changed
        for part in outer:
            group = group.setdefault(part, {})
        group[last] = value
    return changed


def value_at(document: Document, key: str) -> Any:
    """The value at a dotted key; None if there is none."""
    value: Any = document
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _set(document: Document, key: str, value: Any) -> None:
    """Set a dotted key; unknown keys are created, so that the final check refuses them."""
    *parents, last = key.split(".")
    group = document
    for parent in parents:
        inner = group.setdefault(parent, {})
        if not isinstance(inner, dict):
            raise ParamsRefusedError(
                "params.yaml: unknown key {key}; {parent} is a value, not a group of keys.",
                code="bad_keys",
                key=key,
                parent=parent,
                keys=(key,),
            )
        group = inner
    is_same = last in group and group[last] == value
    if not is_same or isinstance(group[last], bool) != isinstance(value, bool):  # 1 is not true
        group[last] = _in_line(value)


def _in_line(value: Any) -> Any:
    """Write a list on the line of its key, before the comment there."""
    if not isinstance(value, list):
        return value
    line = CommentedSeq(value)
    line.fa.set_flow_style()
    return line


class _Representer(RoundTripRepresenter):
    """Writes null where ruamel.yaml would leave the value empty."""

    def represent_none(self, data: Any) -> ScalarNode:
        node: ScalarNode = self.represent_scalar("tag:yaml.org,2002:null", "null")
        return node


_Representer.add_representer(type(None), _Representer.represent_none)


def _yaml() -> YAML:
    yaml = YAML()
    yaml.Representer = _Representer
    yaml.width = 120
    return yaml


def _text(document: object) -> str:
    stream = io.StringIO()
    _yaml().dump(document, stream)
    return stream.getvalue()


def _plain(text: str) -> Any:
    return load_yaml(text)


def _restore_spacing(text: str) -> str:
    """Restore the blank lines between groups, if there are any: ruamel.yaml attaches each to a group's last key."""
    # A blank line that came out before the last, indented lines of a group goes behind them, before the next group.
    moved = re.sub(r"\n\n((?: .*\n)+)(?=\w)", r"\n\1\n", text)
    # Where groups are set apart at all, each is.
    return re.sub(r"(\n .*\n)(?=\w)", r"\1\n", moved) if re.search(r"\n\n\w", moved) else moved

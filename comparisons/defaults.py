"""Tests the default settings on data sets that are not benchmarks: `python -m comparisons.defaults FOLDER`.

Synthetic tables, images and texts and data sets of scikit-learn are treated as data sets with a user's own card. In
runs with seeded noise, defaults.csv compares the settings of `recipe` with the previous defaults, the majority class of
the held-out records, and the same model without privacy. defaults-limits.csv has runs on both sides of the limits of
`tasks.preflight.sanity`.
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import torch
import typer
from numpy.typing import NDArray
from sklearn.datasets import load_breast_cancer, load_digits, load_wine

from algorithms.core.training import ResumableRun, train
from algorithms.privacy.barrier.barrier import ComputeConfig
from algorithms.privacy.mechanisms.noise import seeded_generator
from data import dataset_info
from data.card import DataCard, data_card
from data.card import RecordCounts as Numbers
from data.prepared import HeldOut
from data.readers.records import RecordBatch
from tasks.calibrate import plan_for
from tasks.config import params
from tasks.config.overrides import recipe
from tasks.evaluate import evaluate
from tasks.model_building import model_for

Array = NDArray[np.float64]
TEST_RECORDS, WORDS, LENGTH = 4000, 200, 20
BEFORE: dict[str, Any] = {
    "steps": 300,
    "clip_norm": 1.0,
    "update": {"learning_rate": 1.0, "schedule": "linear"},
}
"""The previous defaults for all data, with a batch of a twentieth of the records."""


@dataclass(frozen=True)
class SyntheticSet:
    """Features [n, *shape] and labels [n]; the last `test` are held out. tokens: vocabulary size of texts."""

    features: NDArray[Any]
    labels: NDArray[np.int64]
    test: int
    tokens: int | None = None

    def card(self) -> DataCard:
        """A user's own card, with what a recipe and a plan look at."""
        names = tuple(str(index) for index in range(int(self.labels.max()) + 1))
        numbers = Numbers(train=len(self.labels) - self.test, test=self.test)
        changes = {"name": "own", "classes": names, "records": numbers}
        if self.tokens is None:
            return data_card("mnist").model_copy(update=changes | {"shape": self.features.shape[1:]})
        known = data_card("imdb")
        form = {"vocabulary": self.tokens, "length": self.features.shape[1], "words_sha256": None}
        return known.model_copy(update=changes | {"reader": known.reader.model_copy(update=form)})


def table(
    n: int, *, classes: int = 2, majority: float = 0.73, signal: float = 2.0, many: bool = False
) -> SyntheticSet:
    """Six numeric columns, three of them heavy-tailed within generous bounds, and five or seven categorical ones.

    majority: share of the first class. signal: scale of the scores that the labels are drawn from.
    """
    random = np.random.default_rng(n + classes)
    m = n + TEST_RECORDS
    amounts, marks = random.lognormal(size=(m, 3)), random.normal(0.35, 0.12, size=(m, 2))
    rare = (random.random((m, 1)) < 0.05) * random.random((m, 1))
    numeric = np.clip(np.hstack([amounts / [20, 50, 100], marks, rare]), 0, 1)
    sizes = (2, 5, 7, 9, 15, 20, 40) if many else (2, 5, 7, 9, 15)
    chosen = [np.eye(size + 1)[random.choice(size, m, p=random.dirichlet(np.ones(size)))] for size in sizes]
    seen = np.hstack([np.log(amounts), (marks - 0.35) / 0.12, 3 * (rare > 0), 1.5 * np.hstack(chosen)])
    scores = (seen - seen.mean(axis=0)) @ random.normal(size=(seen.shape[1], classes))
    scores = scores * signal / scores.std() / 2 + random.gumbel(size=(m, classes))
    lead = np.sort(scores[:, 0] - scores[:, 1:].max(axis=1))[int((1 - majority) * m)]
    scores[:, 0] -= lead
    return SyntheticSet(np.hstack([numeric, *chosen]).astype(np.float32), scores.argmax(axis=1), TEST_RECORDS)


def images(n: int, *, classes: int = 6, side: int = 28, test: int = 1000) -> SyntheticSet:
    """Noisy images with a smooth pattern per class, of varying strength, shifted by up to three pixels."""
    random = np.random.default_rng(n)
    axis = np.linspace(0, 1, side)
    waves = np.stack([np.cos(math.pi * k * axis) for k in range(1, 6)])
    patterns = np.einsum("ckl,kx,ly->cxy", random.normal(size=(classes, 5, 5)), waves, waves)
    patterns /= np.abs(patterns).max(axis=(1, 2), keepdims=True)
    labels = random.integers(classes, size=n + test)
    pixels = 0.5 + 0.25 * random.normal(size=(n + test, side, side))
    moves, strength = random.integers(-3, 4, size=(n + test, 2)), random.uniform(0.1, 0.4, n + test)
    for index, label in enumerate(labels):
        pixels[index] += strength[index] * np.roll(patterns[label], moves[index], axis=(0, 1))
    return SyntheticSet(np.clip(pixels, 0, 1)[:, None].astype(np.float32), labels, test)


def texts(n: int, *, classes: int = 2, test: int = 1000) -> SyntheticSet:
    """Texts of 10 to 20 words with Zipf frequencies, of which two in five depend on the class."""
    random = np.random.default_rng(n)
    usual = 1 / np.arange(1, WORDS - 1)
    shifted = usual * np.exp(2 * random.normal(size=(classes, WORDS - 2)))
    labels = random.integers(classes, size=n + test)
    tokens = np.zeros((n + test, LENGTH), np.int32)
    for index, label in enumerate(labels):
        length = random.integers(LENGTH // 2, LENGTH + 1)
        of_class = random.random(length) < 0.4
        common, special = (
            random.choice(WORDS - 2, length, p=weights / weights.sum()) for weights in (usual, shifted[label])
        )
        tokens[index, LENGTH - length :] = 2 + np.where(of_class, special, common)
    return SyntheticSet(tokens, labels, test, tokens=WORDS)


def shipped(loaded: Any, *, side: int | None = None) -> SyntheticSet:
    """A data set of scikit-learn, three in ten records held out; as images of `side` pixels if that is given.

    A column's bounds are half as wide again as its records, as an owner might declare them.
    """
    features = np.asarray(loaded.data, np.float64)
    features = features / (1.5 * features.max(axis=0) + 1e-9) if side is None else features / features.max()
    if side is not None:
        images = features.reshape(-1, 1, 8, 8)
        features = images.repeat(side // 8, axis=2).repeat(side // 8, axis=3)
    order = np.random.default_rng(0).permutation(len(features))
    return SyntheticSet(features[order].astype(np.float32), loaded.target[order], 3 * len(features) // 10)


def accuracy(
    records: SyntheticSet, model: str, settings: Mapping[str, Any], *, name: str, epsilon: float, seeds: int
) -> float:
    """The mean held-out accuracy of runs with seeded noise."""
    info = dataset_info(records.card().model_copy(update={"public": True}))
    document = {
        "privacy": {"epsilon": epsilon, "delta": 1e-5, "noise": "seeded"},
        "algorithm": {"name": name, **settings},
        "model": {"name": model},
    }
    chosen = params.parse(document, reads=("privacy", "features", "algorithm", "model"))
    plan, n = plan_for(chosen, info), len(records.labels) - records.test
    held_out = HeldOut(info, records.features[n:], records.labels[n:])
    accuracies = []
    for seed in range(seeds):
        state, _, trained = train(
            chosen.algorithm,
            plan,
            model_for(chosen, info),
            open_records=lambda: RecordBatch(records.features[:n], records.labels[:n]),
            run=ResumableRun(run_id="study", generator=seeded_generator(seed), folder=Path(os.devnull)),
            compute=ComputeConfig(torch.device("cpu"), 1024, None),
        )
        released = trained.published_tensors(chosen.algorithm.released(state))
        accuracies.append(np.mean(evaluate(trained, released, held_out).predicted == records.labels[n:]))
    return float(np.mean(accuracies))


@dataclass(frozen=True)
class Case:
    """Data sets of one kind and several sizes; epsilons to try, and the number of seeds where that is quick."""

    name: str
    make: Callable[[int], SyntheticSet]
    sizes: tuple[int, ...]
    epsilons: tuple[float, ...] = (0.5, 2.0, 8.0)
    seeds: int = 3

    def rows(self) -> Iterator[dict[str, Any]]:
        """One row for each size and epsilon."""
        for size in self.sizes:
            records = self.make(size)
            card, held_out = records.card(), records.labels[-records.test :]
            n = len(records.labels) - records.test
            without = recipe(card, "non_private", 1.0)
            best = accuracy(
                records, without.model, without.settings, name="non_private", epsilon=1.0, seeds=1
            )
            before = {"expected_batch_size": round(0.05 * n), **BEFORE}
            seeds = self.seeds if n < 50_000 else 1
            for epsilon in self.epsilons:
                usual = recipe(card, "dp_sgd", epsilon)
                runs = {"before": before, "now": usual.settings}
                yield {
                    "set": self.name,
                    "records": n,
                    "epsilon": epsilon,
                    "majority": float(np.bincount(held_out).max() / records.test),
                    **{
                        column: accuracy(
                            records, usual.model, settings, name="dp_sgd", epsilon=epsilon, seeds=seeds
                        )
                        for column, settings in runs.items()
                    },
                    "not private": best,
                    "expected_batch_size": usual.settings["expected_batch_size"],
                    "learning_rate": usual.settings["update"]["learning_rate"],
                }


SIZES = (500, 5000, 50_000)
CASES = (
    Case("table, 73 % in one class", table, SIZES),
    Case("table, 90 % in one class", lambda n: table(n, majority=0.9), SIZES),
    Case("table, 111 features, balanced", lambda n: table(n, majority=0.5, many=True), SIZES),
    Case("table, 4 classes", lambda n: table(n, classes=4, majority=0.4, signal=3.0), SIZES),
    Case("breast_cancer", lambda _: shipped(load_breast_cancer()), (398,), seeds=5),
    Case("wine", lambda _: shipped(load_wine()), (125,), seeds=5),
    Case("digits, 8 x 8", lambda _: shipped(load_digits(), side=8), (1258,)),
    Case("digits, enlarged to 24 x 24", lambda _: shipped(load_digits(), side=24), (1258,), (2.0, 8.0), 1),
    Case("made-up images, 28 x 28", images, (5000,), (2.0, 8.0), 1),
    Case("made-up texts of 20 words", texts, (5000,), (2.0, 8.0), 1),
)


def limits() -> Iterator[dict[str, Any]]:
    """Accuracy of runs on both sides of the limits of `tasks.preflight.sanity`, otherwise with the default settings."""
    small = {"table of 500": table(500), "breast_cancer": shipped(load_breast_cancer())}
    for name, records in (small | {"digits, 8 x 8": shipped(load_digits(), side=8)}).items():
        n, columns, classes = (
            len(records.labels) - records.test,
            records.features[0].size + 1,
            int(records.labels.max()) + 1,
        )
        for signal in (0.5, 1.0, 2.0, 4.0, 8.0):
            parameters = columns * (1 if classes == 2 else classes)
            epsilon = signal * math.sqrt(2 * math.log(1.25e5) * parameters) / n
            yield _run(records, name, epsilon=epsilon, seeds=5) | {"what": "signal", "value": signal}
    records = table(5000)
    for rate in (1e-9, 1e-6, 1e-3, 1e2, 1e3, 1e6, 1e9):
        yield _run(records, "table of 5000", epsilon=1.0, seeds=1, rate=rate) | {
            "what": "rate",
            "value": rate,
        }


def _run(
    records: SyntheticSet, name: str, *, epsilon: float, seeds: int, rate: float | None = None
) -> dict[str, Any]:
    chosen, held_out = recipe(records.card(), "dp_sgd", epsilon), records.labels[-records.test :]
    update = chosen.settings["update"] | ({} if rate is None else {"learning_rate": rate})
    reached = accuracy(
        records,
        chosen.model,
        chosen.settings | {"update": update},
        name="dp_sgd",
        epsilon=epsilon,
        seeds=seeds,
    )
    majority = float(np.bincount(held_out).max() / records.test)
    return {"set": name, "epsilon": epsilon, "majority": majority, "accuracy": reached}


def main(
    folder: Annotated[Path, typer.Argument(help="Where defaults.csv goes; made if it is not there.")],
    only: Annotated[str, typer.Option(help="Only sets whose name begins so, added to what is there.")] = "",
) -> None:
    """Compare the default settings with the previous ones, and print each run's result."""
    folder.mkdir(parents=True, exist_ok=True)
    for row in chain.from_iterable(case.rows() for case in CASES if case.name.startswith(only)):
        _add(row, folder / "defaults.csv")
    for row in limits() if not only or only == "limits" else ():
        _add(row, folder / "defaults-limits.csv")


def _add(row: Mapping[str, Any], path: Path) -> None:
    typer.echo(str(row))
    pd.DataFrame([row]).to_csv(path, mode="a", header=not path.exists(), index=False, float_format="%.4g")


if __name__ == "__main__":
    torch.set_num_threads(1)
    typer.run(main)

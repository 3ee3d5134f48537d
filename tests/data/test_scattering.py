"""Scattering: the library's values, each image by itself, and only images."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kymatio.torch import Scattering2D
from numpy.typing import NDArray

from data import DataRefusedError, DatasetInfo, dataset_info, prepared, transforms
from data.card import data_card
from data.description import scattered_shape
from data.readers.records import RecordBatch, RecordChunk
from data.transforms import scatter
from tasks.config import params
from tasks.prepare import prepare
from tests.data.conftest import Document, Store
from tests.support.refusals import refused_as
from tests.support.threads import cpu_threads

SHAPES = {"mnist": (81, 7, 7), "fashion-mnist": (81, 7, 7), "digits": (81, 2, 2), "cifar-10": (243, 8, 8)}


def images(name: str, n: int = 7) -> NDArray[np.float32]:
    """Random images of the shape of a data set."""
    shape = data_card(name).input_shape
    return np.random.default_rng(1).random((n, *shape), dtype=np.float32)


def features(name: str, *parts: NDArray[np.float32]) -> NDArray[np.float32]:
    """The features of images that come in some chunks."""
    chunks = [RecordChunk("train", RecordBatch(part, np.arange(len(part)))) for part in parts]
    found = list(scatter(data_card(name), chunks))
    assert np.concatenate([block.records.labels for block in found]).tolist() == [
        label for part in parts for label in range(len(part))
    ]
    return np.concatenate([block.records.features for block in found])


@pytest.mark.parametrize("name", SHAPES)
def test_the_shape_is_said_before_and_kept(name: str) -> None:
    found = features(name, images(name))
    assert found.shape == (7, *SHAPES[name]) and found.dtype == np.float32
    assert scattered_shape(data_card(name)) == SHAPES[name]


def test_grey_images_are_taken_as_they_are() -> None:
    pixels = images("mnist")
    direct = Scattering2D(J=2, shape=(28, 28), L=8)(torch.from_numpy(pixels)).numpy()
    assert np.array_equal(features("mnist", pixels), direct.reshape(7, 81, 7, 7))


def test_each_colour_is_normalised_by_constants_and_taken_by_itself() -> None:
    pixels, transform = images("cifar-10"), Scattering2D(J=2, shape=(32, 32), L=8)
    found = features("cifar-10", pixels)
    for colour, (mean, deviation) in enumerate([(0.485, 0.229), (0.456, 0.224), (0.406, 0.225)]):
        seen = torch.from_numpy((pixels[:, colour] - mean) / deviation)
        direct = transform(seen.float().contiguous()).numpy()
        assert found[:, 81 * colour : 81 * (colour + 1)] == pytest.approx(direct, abs=1e-6)


@pytest.mark.parametrize("name", ["mnist", "cifar-10"])
def test_an_image_has_the_same_features_whatever_is_beside_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pixels = images(name, 5)
    together = features(name, pixels)
    assert np.array_equal(features(name, *np.split(pixels, [1, 3])), together)
    for at_once, workers in ((1, 1), (3, 2)):
        monkeypatch.setattr(transforms, "SCATTERED_AT_ONCE", at_once)
        with cpu_threads(workers):
            assert np.array_equal(features(name, pixels), together)
            assert torch.get_num_threads() == workers
    pixels[1:] = 1.0
    assert np.array_equal(features(name, pixels)[0], together[0])


def test_chunks_are_passed_on_as_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transforms, "SCATTERED_AT_ONCE", 2)
    taken = []

    def chunks() -> Any:
        for start in range(3):
            taken.append(start)
            yield RecordChunk("train", RecordBatch(images("digits", 2), np.zeros(2, np.int64)))

    assert len(next(scatter(data_card("digits"), chunks())).records) == 2
    assert taken == [0]


@pytest.mark.parametrize("name", ["adult", "imdb", "synthetic-logistic"])
def test_what_is_no_image_is_refused(name: str) -> None:
    with refused_as("transform_unfit", DataRefusedError, dataset=name, smallest=8):
        dataset_info(data_card(name), "scattering")


def test_small_images_are_refused_before_anything_is_fetched(
    store: Store, images: Document, tmp_path: Path
) -> None:
    chosen = params.parse({"data": {"dataset": "dots", "transform": "scattering"}}, reads=("data",))
    with refused_as("transform_unfit", DataRefusedError, shape=[1, 2, 2]):
        prepare(
            chosen, mirror=None, home=tmp_path, destination=tmp_path / "p", root=tmp_path, cards=store(images)
        )
    assert os.listdir(tmp_path) == ["cards"]


def test_prepare_writes_features_and_says_so(tmp_path: Path) -> None:
    chosen = params.parse({"data": {"dataset": "digits", "transform": "scattering"}}, reads=("data",))
    info = prepare(chosen, mirror=None, home=tmp_path, destination=tmp_path / "p")
    assert (info.transform, info.feature_norms, info.tokens) == ("scattering", None, None)
    assert DatasetInfo.from_json(info.to_json()) == info
    loaded = prepared.load(tmp_path / "p")
    assert loaded.info == info
    assert loaded.train_features.shape == (1436, 81, 2, 2) and loaded.test_features.shape == (361, 81, 2, 2)
    assert np.isfinite(loaded.train_features).all() and loaded.train_features[0].std() > 0

"""Encoders are tried on made-up records: what mixes them is refused, and what does not is taken."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from algorithms.encoders import Encoder, EncoderSettings, encoder
from algorithms.encoders.independence import check_encoder_is_independent, in_portions
from algorithms.errors import ModelRefusedError
from tests.support.own_code import own_code_alone as own_code_alone

SHAPE = (1, 6, 6)


def images(encode: Callable[[Any], Any], width: int = 36) -> Encoder:
    return Encoder("own", "images", width, "0" * 64, "unknown", lambda: in_portions(encode))


def check(made: Encoder) -> None:
    check_encoder_is_independent(made, made.load(), SHAPE, is_own=True)


def of_network(network: nn.Module) -> Callable[[Any], Any]:
    def encode(records: NDArray[np.float32]) -> NDArray[np.float32]:
        with torch.no_grad():
            return network(torch.from_numpy(records)).flatten(1).numpy()

    return encode


def flat(records: NDArray[np.float32]) -> NDArray[np.float32]:
    return records.reshape(len(records), -1)


def counting() -> Callable[[Any], Any]:
    calls = [0.0]

    def encode(records: NDArray[np.float32]) -> NDArray[np.float32]:
        calls[0] += 1.0
        return (flat(records) + calls[0]).astype(np.float32)

    return encode


MIXING: dict[str, Callable[[], Callable[[Any], Any]]] = {
    "batch norm": lambda: of_network(nn.Sequential(nn.Conv2d(1, 1, 3, padding=1), nn.BatchNorm2d(1))),
    "z-score": lambda: lambda x: ((flat(x) - flat(x).mean(0)) / (flat(x).std(0) + 1e-3)).astype(np.float32),
    "rank": lambda: lambda x: flat(x).argsort(0).argsort(0).astype(np.float32),
    "whitened by the largest": lambda: lambda x: flat(x) / max(1e-9, float(np.abs(x).max())),
    "a last bit": lambda: lambda x: (flat(x) * (1 + 2e-7 * (x.sum() > 900))).astype(np.float32),
    "dropout": lambda: of_network(nn.Sequential(nn.Conv2d(1, 1, 1), nn.Dropout())),
    "state": counting,
    "place": lambda: lambda x: (flat(x) + np.arange(len(x))[:, None]).astype(np.float32),
}


@pytest.mark.parametrize("name", MIXING)
def test_an_encoder_that_mixes_records_is_refused(name: str) -> None:
    torch.manual_seed(0)
    with pytest.raises(ModelRefusedError, match="other features of a record beside other records"):
        check(images(MIXING[name]()))


def test_an_honest_encoder_is_taken_and_called_with_portions_of_one_size() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(128, 36)).eval()
    check(images(of_network(network)))
    sizes: list[int] = []

    def encode(records: NDArray[np.float32]) -> NDArray[np.float32]:
        sizes.append(len(records))
        return flat(records)

    made = images(encode).load()
    given = np.random.default_rng(0).random((130, *SHAPE), dtype=np.float32)
    assert np.array_equal(made(given), flat(given)) and sizes == [64, 64, 64]


SIZES: list[int] = []


def tokenizer(_: EncoderSettings) -> Encoder:
    """Of one's own; the tokens of a text, and of its words, are one each."""

    def ones(texts: Any, *parts: int) -> NDArray[np.int32]:
        SIZES.append(len(texts))
        return np.ones((len(texts), *parts, 3), np.int32)

    return Encoder(
        *("own", "texts", 3, "0" * 64, "unknown"),
        load=lambda: ones,
        aligned=lambda: lambda texts: ones(texts, 2),
        tokens=9,
    )


def test_an_encoder_of_ones_own_gets_portions_of_one_size_of_words_too() -> None:
    made = encoder(f"{__name__}:tokenizer", EncoderSettings())
    assert made.aligned is not None
    for encode, shape in ((made.load(), (70, 3)), (made.aligned(), (70, 2, 3))):
        SIZES.clear()
        assert encode(["a text"] * 70).shape == shape and SIZES == [64, 64]


def test_texts_are_tried_too() -> None:
    def lengths(texts: Any) -> NDArray[np.float32]:
        return np.array([[len(text)] for text in texts], np.float32)

    for encode, mixes in ((lengths, False), (lambda texts: lengths(texts) - lengths(texts).mean(), True)):
        made = Encoder("own", "texts", 1, "0" * 64, "unknown", lambda encode=encode: in_portions(encode))
        if mixes:
            with pytest.raises(ModelRefusedError, match="beside other records"):
                check(made)
        else:
            check(made)


@pytest.mark.parametrize(
    "encode",
    [
        lambda x: flat(x)[:, :3],
        lambda x: flat(x).astype(np.float64),
        lambda x: flat(x) * np.float32(np.nan),
    ],
)
def test_features_of_another_form_are_refused(encode: Callable[[Any], Any]) -> None:
    with pytest.raises(ModelRefusedError, match=r"return finite float32 of the shape \[n, 36\]"):
        check(images(encode))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("efficientnet-lite0", {"size": 32}),
        ("wordllama", {}),
        ("all-minilm-l6-v2", {"length": 16, "layer": 1}),
    ],
)
def test_the_shipped_encoders_are_taken(name: str, settings: dict[str, Any]) -> None:
    made = encoder(name, EncoderSettings(**settings))
    check_encoder_is_independent(made, made.load(), (3, 32, 32), is_own=False)

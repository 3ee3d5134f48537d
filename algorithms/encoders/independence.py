"""Whether an encoder makes each record's features from that record alone, tried on made-up records.

Kernels round by the size of a batch, so an encoder of one's own is always called with portions of the same size, and is
tried at that size: then an honest one gives the same bits beside any other records.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from algorithms.encoders.encoder import Encode, Encoder
from algorithms.errors import ModelRefusedError

PORTION = 64
"""How many records an encoder of one's own gets at once; the last ones are filled up with blank records."""
_RECORDS = 8
_TOLERANCE = 1e-4
"""How far features may differ, relative to the largest, where the size of a batch is the library's own."""
_POSITION_TOLERANCE = 1e-3
"""How far they may differ at another place in a portion, where kernels may add up in another order."""
_WORDS = ("a", "film", "that", "I", "liked", "not", "at", "all", "1984", "Zürich", "good", "bad")


def in_portions(encode: Encode) -> Encode:
    """The function, called with `PORTION` records each time; blank images or texts are added and taken out again."""

    def encode_in_portions(records: Any) -> NDArray[Any]:
        return np.concatenate(
            [
                _of_a_portion(encode, records[start : start + PORTION])
                for start in range(0, len(records), PORTION)
            ]
        )

    return encode_in_portions


def _of_a_portion(encode: Encode, records: Any) -> NDArray[Any]:
    missing = PORTION - len(records)
    if isinstance(records, np.ndarray) and records.dtype != object:
        blank = np.zeros((missing, *records.shape[1:]), records.dtype)
    else:
        blank = np.full(missing, "", object)
    return np.asarray(encode(np.concatenate([records, blank])))[: len(records)]


def check_encoder_is_independent(
    encoder: Encoder, encode: Encode, shape: Sequence[int], *, is_own: bool
) -> None:
    """Raise ModelRefusedError if made-up records get other features beside other records, or the second time.

    Args:
        encoder: The encoder.
        encode: What its `load` returned.
        shape: Of an image [channels, height, width]; not used for texts.
        is_own: Whether it is of the user's own, whose portions are as in preparing; then features must agree bit for
            bit, except on an accelerator.
    """
    size = PORTION if is_own else _RECORDS
    positions = [0, size // 2, size - 1]
    records = _synthetic_records(encoder, size, shape, seed=0)
    # The brightest image and the longest text are among the others, so that what is taken over records changes.
    records[positions] = [0.5 * x if encoder.takes == "images" else x[:20] for x in records[positions]]
    others, blank = _synthetic_records(encoder, size, shape, seed=1), np.zeros_like(records)
    if encoder.takes == "texts":
        blank[:] = ""
    for batch in (others, blank):
        batch[positions] = records[positions]
    moved = np.roll(records, 1, axis=0)
    usual, in_others, alone, repeated, at_next = map(encode, (records, others, blank, records, moved))
    _check_form(encoder, usual, size)
    is_exact = is_own and not torch.accelerator.is_available()
    near = 0.0 if is_exact else _TOLERANCE
    for features, expected, allowed in (
        (repeated, usual, near),
        (in_others[positions], usual[positions], near),
        (alone[positions], usual[positions], near),
        (np.roll(at_next, -1, axis=0), usual, _POSITION_TOLERANCE),
    ):
        if (
            np.shape(features) != expected.shape
            or _distance(features, expected) > allowed * np.abs(usual).max()
        ):
            raise ModelRefusedError(
                f"the encoder {encoder.name!r} makes other features of a record beside other records, or the second"
                " time, so that adding one record would change others; use public constants in place of what is taken"
                " over records, and put a network into evaluation mode by .eval()."
            )


def _synthetic_records(encoder: Encoder, size: int, shape: Sequence[int], *, seed: int) -> NDArray[Any]:
    """Images of uniform noise, dark for an odd seed; or texts of several lengths."""
    generator = np.random.default_rng(seed)
    if encoder.takes == "images":
        brightness = 0.1 if seed % 2 else 1.0
        return brightness * generator.random((size, *shape), dtype=np.float32)
    lengths = generator.integers(0, 12 * (seed + 1), size)
    return np.array([" ".join(generator.choice(_WORDS, length)) for length in lengths], object)


def _check_form(encoder: Encoder, features: NDArray[Any], size: int) -> None:
    kind = np.float32 if encoder.tokens is None else np.int32
    fits = np.shape(features)[:1] == (size,) and np.shape(features)[-1] == encoder.width
    if not fits or features.dtype != kind or not np.isfinite(features).all():
        raise ModelRefusedError(
            f"the encoder {encoder.name!r} made {np.asarray(features).dtype} of the shape {list(np.shape(features))} of"
            f" {size} made-up records; return finite {np.dtype(kind)} of the shape [n, {encoder.width}]."
        )


def _distance(features: NDArray[Any], expected: NDArray[Any]) -> float:
    return float(np.abs(np.asarray(features, np.float64) - expected).max())

"""An encoder of one's own, as a user would name it package.module:factory: random projections of images."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from algorithms.encoders import Encoder, EncoderSettings

LOADED: list[EncoderSettings] = []


def make(settings: EncoderSettings) -> Encoder:
    """Twelve features of an image of 8 x 8 pixels."""

    def load() -> Any:
        LOADED.append(settings)
        directions = np.random.default_rng(3).standard_normal((64, 12)).astype(np.float32)

        def encode(images: NDArray[np.float32]) -> NDArray[np.float32]:
            rows = [np.tanh(image.reshape(-1) @ directions) for image in images]
            return np.stack(rows)

        return encode

    return Encoder("tests.support.tiny_encoder:make", "images", 12, "ab" * 32, "unknown", load)

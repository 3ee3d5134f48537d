"""A reader of one's own, as a user would name it package.module:factory: lines of a class and two numbers."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from data.readers.records import RecordBatch, RecordChunk


def make(settings: Mapping[str, Any]) -> Any:
    """The function of the reader; settings: `scale`, by which the numbers are multiplied."""

    def read(files: Mapping[str, Path]) -> Iterator[RecordChunk]:
        (path,) = files.values()
        lines = [line.split() for line in path.read_text().splitlines()]
        features = np.array([[float(one) for one in line[1:]] for line in lines], np.float32)
        yield RecordChunk(
            "train", RecordBatch(features * settings["scale"], np.array([int(line[0]) for line in lines]))
        )

    return read


def texts(_: Mapping[str, Any]) -> Any:
    """The second word of each line, as a text."""

    def read(files: Mapping[str, Path]) -> Iterator[RecordChunk]:
        (path,) = files.values()
        lines = [line.split() for line in path.read_text().splitlines()]
        words = np.array([line[1] for line in lines], dtype=object)
        yield RecordChunk("train", RecordBatch(words, np.array([int(line[0]) for line in lines])))

    return read

"""Transforms of each record by itself, which cost nothing: scattering, and the features of a frozen public encoder.

Scattering replaces the pixels of an image by its wavelet features: the transform of Bruna and Mallat 2013 with two
scales and eight angles, on which Tramèr and Boneh 2021 (arXiv:2011.11660) train linear models and small networks.
"""

import hashlib
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from data.card import DataCard, DataRefusedError
from data.description import ANGLES, SCALES, EncoderFacts, scattered_shape
from data.files import write_whole
from data.readers.records import Features, RecordBatch, RecordChunk, add_features
from data.targets import LabelType

SCATTERED_AT_ONCE, _ENCODED_AT_ONCE = 256, 512
_MEANS, _DEVIATIONS = (
    np.array(values, np.float32)[:, None, None] for values in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
)
"""Means and standard deviations of ImageNet's red, green and blue pixels, which are public."""
Encode = Callable[[Any], Features]


def scatter(card: DataCard, chunks: Iterable[RecordChunk]) -> Iterator[RecordChunk]:
    """Replace the pixels of each image by its features, some hundred images at a time.

    An image's features are the same, bit for bit, whatever else is in its chunk. Raises DataRefusedError as
    `scattered_shape` does.
    """
    import torch  # these take seconds to import, and only scattering needs them
    from kymatio.torch import Scattering2D

    shape, (channels, height, width) = scattered_shape(card), card.input_shape
    transform = Scattering2D(J=SCALES, shape=(height, width), L=ANGLES)

    def features_of(images: Features) -> Features:
        seen = (images - _MEANS) / _DEVIATIONS if channels == len(_MEANS) else images
        with torch.no_grad():
            coefficients: Features = transform(torch.from_numpy(np.ascontiguousarray(seen))).numpy()
        return coefficients.reshape(-1, *shape)

    for portion, features in _map_features(chunks, features_of, at_once=SCATTERED_AT_ONCE):
        yield replace(portion, records=replace(portion.records, features=features))


def encode_records(
    chunks: Iterable[RecordChunk],
    facts: EncoderFacts,
    load: Callable[[], Encode],
    label_type: LabelType,
    *,
    folder: Path,
    say: Callable[[int], object],
) -> Iterator[RecordChunk]:
    """Replace the records of the chunks by their features from a frozen public network.

    Encoded portions are kept until all records are encoded, so a killed prepare stage can be resumed.

    Args:
        chunks: Chunks of images as float32 [n, channels, height, width], or of texts as an array of strings [n].
        facts: The facts of the encoder.
        load: Loads its weights; called only if something has to be encoded.
        label_type: The target; if it has a label per token, labels are made from the tokens.
        folder: Folder for encoded portions, readable by the owner only; deleted at the end.
        say: Called with the number of encoded records, after each portion.

    Raises DataRefusedError, without its message, for an error of the encoder.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    (folder / ".gitignore").write_text("*\n", encoding="utf-8")
    loaded, lock, done = cache(load), Lock(), 0
    shape = (2, facts.width) if label_type.kind == "tags" else (facts.width,)

    def features_of(records: Features) -> Features:
        digest = hashlib.sha256(f"{facts.name} {facts.sha256} {facts.settings} ".encode())
        add_features(records, digest)
        path = folder / f"{digest.hexdigest()}.npy"
        with suppress(OSError, ValueError):
            stored: Features = np.load(path)
            if stored.shape == (len(records), *shape):
                return stored
        with lock:  # the weights are loaded at first use, once for all threads
            encode = loaded()
        try:
            features = encode(records)
        except MemoryError:
            raise
        except Exception as error:
            raise DataRefusedError(
                "the encoder {name!r} raised {error}; its message is not shown, as it may hold a"
                " value of a record: try the encoder on made-up records.",
                code="code_failed",
                name=facts.name,
                error=type(error).__name__,
            ) from None
        write_whole(path, lambda fresh: _save(fresh, features), mode=0o600)
        return features

    for portion, features in _map_features(chunks, features_of, at_once=_ENCODED_AT_ONCE):
        done += len(features)
        say(done)
        row_labels = label_type.align_labels(features, portion.records.labels, facts.padding)
        yield replace(portion, records=RecordBatch(*row_labels, portion.records.keys))
    shutil.rmtree(folder)


def _save(path: Path, values: Features) -> None:
    with path.open("wb") as file:  # numpy.save would append a suffix to the path
        np.save(file, values)


def _map_features(
    chunks: Iterable[RecordChunk], features_of: Callable[[Features], Features], *, at_once: int
) -> Iterator[tuple[RecordChunk, Features]]:
    """Portions of the chunks, and the new features of their records.

    `features_of` gets at most `at_once` records at a time. It is called by as many workers as torch has threads, each
    with one thread: a transform is hundreds of short operations, and threads that share each operation wait for each
    other, which took more than twice as long on a busy machine.
    """
    import torch

    count = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            for chunk in chunks:
                for portion in chunk.portions(count * at_once):
                    features = pool.map(
                        features_of, [piece.records.features for piece in portion.portions(at_once)]
                    )
                    yield portion, np.concatenate(list(features))
    finally:
        torch.set_num_threads(count)

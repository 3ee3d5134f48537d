"""Benchmark of `prepare` with scattering features: `python -m benchmarks.scattering [--dataset D] [--images N]`.

It uses the data set's first images, from the files that `prepare` itself would use, and a temporary folder.
"""

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from data import DataCard, dataset_info, prepared
from data.card import data_card
from data.files import PUBLIC_KEY, RAW, FileSources, fetch
from data.readers.records import RecordBatch, RecordChunk
from data.reading import read
from data.transforms import scatter
from tasks.config import data_mirror

_WHOLE = 60_000


def first_images(card: DataCard, images: int) -> Iterator[RecordChunk]:
    """The first training images, in the blocks in which they are read."""
    files = fetch(card, FileSources(root=Path(), mirror=data_mirror(), cache=RAW), key=PUBLIC_KEY)
    for block in read(card, files):
        some = RecordBatch(block.records.features[:images], block.records.labels[:images])
        if block.part == "train" and len(some):
            images -= len(some)
            yield RecordChunk("train", some)


def seconds(card: DataCard, images: int) -> float:
    """Seconds to write the features of some images, including reading files and loading libraries."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        blocks = scatter(card, first_images(card, images))
        info = dataset_info(card, "scattering")
        prepared.write(Path(folder) / "prepared", blocks, info, salt=bytes(32), at_most=None)
    return time.perf_counter() - start


def main(
    dataset: Annotated[str, typer.Option(help="mnist, fashion-mnist, cifar-10 or cifar-100.")] = "mnist",
    images: Annotated[int, typer.Option(min=1, max=_WHOLE, help="How many images at most.")] = _WHOLE,
) -> None:
    """Prepare the features and print the number of images per second."""
    card = data_card(dataset)
    images = min(images, card.records.train or images)
    rate = images / seconds(card, images)
    threads = torch.get_num_threads()
    Console().print(
        f"{images} images of {dataset}, {threads} threads: {rate:.0f} images/s; {_WHOLE} take {_WHOLE / rate:.0f} s"
    )


if __name__ == "__main__":
    typer.run(main)

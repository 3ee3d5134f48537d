"""python -m benchmarks.scattering [--images N]: how long `prepare` takes to put scattering features in place of MNIST.

The images are MNIST's first ones, of the files that `prepare` itself would use, and are put into a temporary folder.
"""

import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from data import DataCard, catalogue, prepared, public_description
from data.fetch import RAW, Places, fetch
from data.owner import PUBLIC_KEY
from data.reading import read
from data.records import Block, Records
from data.scattering import scattered
from tasks.environment import data_mirror

_WHOLE = 60_000


def first_images(card: DataCard, images: int) -> Iterator[Block]:
    """The first training images as one block."""
    files = fetch(card, Places(root=Path(), mirror=data_mirror(), cache=RAW), key=PUBLIC_KEY)
    for block in islice(read(card, files), 1):
        yield Block("train", Records(block.records.features[:images], block.records.labels[:images]))


def seconds(card: DataCard, images: int) -> float:
    """What it takes to write the features of some images, with reading the files and loading the libraries."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        blocks = scattered(card, first_images(card, images))
        public = public_description(card, "scattering")
        prepared.write(Path(folder) / "prepared", blocks, public, salt=bytes(32), at_most=None)
    return time.perf_counter() - start


def main(images: Annotated[int, typer.Option(min=1, max=_WHOLE, help="How many images.")] = _WHOLE) -> None:
    """Prepare the features and say how many images that is a second."""
    rate = images / seconds(catalogue.card("mnist"), images)
    threads = torch.get_num_threads()
    Console().print(
        f"{images} images, {threads} threads: {rate:.0f} images/s; {_WHOLE} take {_WHOLE / rate:.0f} s"
    )


if __name__ == "__main__":
    typer.run(main)

"""Tries the smallest model of each timm family in the engine: `python -m benchmarks.families [FAMILIES]`.

Images have 64 pixels, or the first size in `SIZES` that the model accepts; BatchNorm is replaced. Each line gives the
path and the relative error of the clipped sum of three records against a loop over them. Both use 64 bits, since
rounding in 32 bits changes some of these deep networks by a percent. The totals are in docs/zoo.md.
"""

import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from pydantic import JsonValue
from torch import Tensor, nn

from algorithms.gradients import Engine
from algorithms.models import Model, build
from algorithms.models.libraries import imported_library
from benchmarks.architectures import losses
from benchmarks.zoo import error

SIZES = (64, 128, 160, 192, 224, 256)
_RECORDS, _CLASSES = 3, 3


def main(names: list[str]) -> None:
    """Print a line for each named family, or for all."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for family, architecture in smallest(names):
        sys.stdout.write(f"{family}: {architecture}, {_line(architecture)}\n")
        sys.stdout.flush()


def smallest(names: list[str]) -> Iterator[tuple[str, str]]:
    """Each family with its model that has the fewest parameters."""
    timm: Any = imported_library("timm")
    for family in timm.list_modules():
        if names and family not in names:
            continue
        sizes = {name: _size(timm, name) for name in timm.list_models(module=family)}
        if sizes:
            yield family, min(sizes, key=sizes.__getitem__)


def _size(timm: Any, name: str) -> int:
    with torch.device("meta"):
        module: nn.Module = timm.create_model(name)
    return sum(parameter.numel() for parameter in module.parameters())


def _line(architecture: str) -> str:
    why = "no size"
    for size in SIZES:
        try:
            model = _build(architecture, size)
            with torch.no_grad():
                model.module(torch.zeros(1, 3, size, size))
        except Exception as refused:  # models reject an image size with errors of any kind
            why = str(refused).partition("\n")[0]
            continue
        return _inspect(model, size)
    return f"refused: {why}"


def _build(architecture: str, size: int) -> Model:
    settings: dict[str, JsonValue] = {"architecture": architecture, "replace_batch_norm": True}
    return build("timm", input_shape=(3, size, size), classes=_CLASSES, seed=0, settings=settings)


def _inspect(model: Model, size: int) -> str:
    start = time.process_time()
    try:
        engine = Engine(model, input_shape=(3, size, size))
    except ValueError as refused:
        return f"{size} pixels, refused: {refused}"
    seconds = time.process_time() - start
    path = "batched" if engine.is_batched else "record by record"
    by_record = (
        f" but for {', '.join(engine.operations_without_rule)}" if engine.operations_without_rule else ""
    )
    return f"{size} pixels, {path}{by_record}, error {_error(model, size):.0e}, inspected in {seconds:.1f} s"


def _error(model: Model, size: int) -> float:
    exact = Model(model.name, model.module.double(), losses, lambda outputs: outputs)
    draw = torch.Generator().manual_seed(0)
    inputs: Tensor = torch.randn(_RECORDS, 3, size, size, generator=draw, dtype=torch.float64)
    labels = torch.arange(_RECORDS) % _CLASSES
    engine = Engine(exact, input_shape=(3, size, size), input_dtype=torch.float64)
    return error(exact, engine, inputs, labels)


if __name__ == "__main__":
    main(sys.argv[1:])

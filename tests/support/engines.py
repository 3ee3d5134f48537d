"""Engines for equal models and settings, which many tests ask for, made once: most of a short run is an inspection."""

import hashlib
import io
import marshal
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from threading import get_ident
from types import FunctionType
from typing import Any

import pytest
import torch

from algorithms.gradients import Engine
from algorithms.models import Model
from algorithms.privacy.barrier.compute_config import ComputeConfig

_ENGINES: dict[bytes, Engine] = {}
_ENGINE = ComputeConfig.engine
_LARGE = 1_000_000
"""Parameters of a model whose copy is not worth keeping."""


class _ByValue(pickle.Pickler):
    """Has the numbers of tensors in the place of their storage, which has an address, and functions by their code."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            numbers = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            layout = str(value.dtype), str(value.device), tuple(value.shape), value.stride()
            return tuple, ((*layout, value.requires_grad, numbers),)
        if isinstance(value, FunctionType) and "<" in value.__qualname__:
            held = [cell.cell_contents for cell in value.__closure__ or ()]
            return tuple, ((value.__module__, marshal.dumps(value.__code__), value.__defaults__, held),)
        return NotImplemented


def _key(compute: ComputeConfig, model: Model, records: Any) -> bytes:
    """Equal for equal classes, functions, settings and tensors; of this thread, as a pass changes the module in use."""
    settings = (
        compute.device,
        compute.memory_mb,
        compute.expected_batch,
        compute.physical_batch,
        compute.group.count,
    )
    shape, kind = records.features.shape[1:], str(records.features.dtype)
    written = io.BytesIO()
    _ByValue(written).dump(
        [get_ident(), *settings, shape, kind, *(getattr(model, part.name) for part in fields(model))]
    )
    return hashlib.sha256(written.getbuffer()).digest()


def _engine(compute: ComputeConfig, model: Model, records: Any) -> Engine:
    if compute.shards is not None or compute.offload or model.parameter_count > _LARGE:
        return _ENGINE(compute, model, records)
    try:
        key = _key(compute, model, records)
    except (AttributeError, TypeError, ValueError, RuntimeError, pickle.PicklingError):  # of a local class
        return _ENGINE(compute, model, records)
    if (engine := _ENGINES.get(key)) is None:
        engine = _ENGINE(compute, model, records)
        inspection = engine.inspection
        if inspection.layouts is not None and not inspection.without_rule and engine.physical_batch > 1:
            _ENGINES[key] = engine  # the others log that they are slow
    return engine


@contextmanager
def engines_made_once() -> Iterator[None]:
    """In the block engines are remembered, for later blocks as well; for tests that are not of the inspection."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ComputeConfig, "engine", _engine)
        yield


@pytest.fixture(autouse=True, scope="module")
def engines_once() -> Iterator[None]:
    """For a module to import."""
    with engines_made_once():
        yield

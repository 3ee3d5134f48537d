"""Engines for equal models and settings, which many tests ask for, made once: most of a short run is an inspection."""

import hashlib
import io
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from threading import get_ident
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
    """Has the numbers of tensors in the place of their storage, which is written with its address."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            numbers = value.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
            return tuple, ((str(value.dtype), tuple(value.shape), value.requires_grad, numbers),)
        return NotImplemented


def _key(compute: ComputeConfig, model: Model, records: Any) -> bytes:
    """Equal for equal classes, functions, settings and tensors; of this thread, as a pass changes the module in use."""
    written = io.BytesIO()
    parts = [getattr(owner, field.name) for owner in (compute, model) for field in fields(owner)]
    _ByValue(written).dump([get_ident(), records.features.shape[1:], str(records.features.dtype), *parts])
    return hashlib.sha256(written.getbuffer()).digest()


def _engine(compute: ComputeConfig, model: Model, records: Any) -> Engine:
    if compute.shards is not None or compute.offload or model.parameter_count > _LARGE:
        return _ENGINE(compute, model, records)
    try:
        key = _key(compute, model, records)
    except (AttributeError, TypeError, pickle.PicklingError):  # of a function without a name
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

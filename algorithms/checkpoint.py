"""Checkpoints: an algorithm's state and the trace so far in one safetensors file, written whole or not at all.

One file, because a state with an older trace would give later releases the noise of earlier ones. What the barrier
remembers of the records is in it too, apart from the state; the file is the owner's alone and goes with the key.
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from algorithms.privacy.errors import Refused
from algorithms.privacy.importance import LastNorms
from algorithms.privacy.trace import Row, Trace

S = TypeVar("S")
_STATE, _FACTS = "state.safetensors", "checkpoint"
_LAST_NORMS = "private/last_norms"


def save(folder: Path, state: object, *, run_id: str, step: int, trace: Trace, last_norms: LastNorms) -> None:
    """Writes the run's state after `step` steps and its trace so far into `folder`, readable by the owner only."""
    facts = {"run_id": run_id, "step": step, "trace": [asdict(row) for row in trace.rows]}
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in flatten(state).items()}
    kept = last_norms.to_tensor()
    if kept is not None:
        tensors[_LAST_NORMS] = kept
    _write(folder / _STATE, lambda path: save_file(tensors, path, metadata={_FACTS: json.dumps(facts)}))


def load(folder: Path, start: S, *, run_id: str, last_norms: LastNorms) -> tuple[S, int, Trace] | None:
    """The run's last checkpoint in `folder` as (state, steps taken, trace), or None where there is none.

    start: the state before the first step, which gives the structure and the devices. last_norms: takes back its own.
    Raises Refused where the checkpoint is damaged, of another run or of a state of other shapes.
    """
    if not (folder / _STATE).exists():
        return None
    expected = flatten(start)
    try:
        with safe_open(folder / _STATE, framework="pt") as file:
            facts = json.loads(file.metadata()[_FACTS])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    except (SafetensorError, KeyError, TypeError, ValueError):
        raise Refused(
            f"the checkpoint in {folder} is damaged; forfeit that run and start a new one."
        ) from None
    kept = tensors.pop(_LAST_NORMS, None)
    if facts["run_id"] != run_id:
        raise Refused(f"the checkpoint in {folder} is of another run; forfeit that run and start a new one.")
    _check_forms(folder, tensors, expected)
    if kept is not None:
        last_norms.restore(kept)
    placed = {name: tensor.to(expected[name].device) for name, tensor in tensors.items()}
    return unflatten(start, placed), facts["step"], Trace([Row(**row) for row in facts["trace"]])


def _check_forms(folder: Path, stored: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    for name in sorted({*stored, *expected}):
        there, here = _form(stored.get(name)), _form(expected.get(name))
        if there != here:
            raise Refused(
                f"{name} is {there} in the checkpoint in {folder}, but {here} in this run; go on with the version that"
                " wrote it, or forfeit that run and start a new one."
            )


def _form(tensor: Tensor | None) -> str:
    if tensor is None:
        return "missing"
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {list(tensor.shape)}"


def flatten(state: Any, prefix: str = "") -> dict[str, Tensor]:
    """The tensors of a dataclass (or mapping) of tensors and dataclasses, by dotted name."""
    tensors: dict[str, Tensor] = {}
    for key, value in _items(state):
        name = prefix + key
        tensors |= {name: value} if isinstance(value, Tensor) else flatten(value, name + ".")
    return tensors


def unflatten(state: S, tensors: Mapping[str, Tensor], prefix: str = "") -> S:
    """`state` with the tensors that `flatten` named put in place."""
    changes = {}
    for key, value in _items(state):
        name = prefix + key
        changes[key] = tensors[name] if isinstance(value, Tensor) else unflatten(value, tensors, name + ".")
    return changes if isinstance(state, Mapping) else replace(state, **changes)  # type: ignore


def _items(state: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(state, Mapping):
        return state.items()
    return ((field.name, getattr(state, field.name)) for field in fields(state))


def _write(path: Path, write: Callable[[Path], None]) -> None:
    """Writes through a temporary file, so that a crash leaves the old file or the new one."""
    fresh = path.with_name(path.name + ".new")
    write(fresh)
    fresh.chmod(0o600)
    with fresh.open("rb") as file:
        os.fsync(file.fileno())
    fresh.replace(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def by_name(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Named parameters as they are published: on the CPU, each in memory of its own."""
    return {name: torch.clone(tensor.detach().cpu()) for name, tensor in named.items()}

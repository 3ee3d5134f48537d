"""A checkpoint: an algorithm's state and the trace so far, in one safetensors file that is written atomically.

A state with an older trace would use the noise of earlier releases again. The file also holds the norms that importance
sampling remembers, which are private; only the owner can read it, and it is deleted with the key.
"""

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load as load_tensors
from safetensors.torch import save_file
from torch import Tensor

from algorithms.core.method import STORED_AS
from algorithms.errors import RefusedError
from algorithms.gradients.placement import Shards, is_divided
from algorithms.privacy.barrier.importance_sampling import LastNorms
from algorithms.privacy.barrier.trace import ReleaseRow, Trace

_LOG = logging.getLogger(__name__)

S = TypeVar("S")
CHECKPOINT, _FACTS, _CHECKSUM = "state.safetensors", "checkpoint", "sha256"
_LAST_NORMS = "private/last_norms"


def save(folder: Path, state: object, *, run_id: str, step: int, trace: Trace, last_norms: LastNorms) -> None:
    """Write a run's state and trace, whole or not at all, readable by the owner only.

    Args:
        folder: Of the run.
        state: A dataclass of tensors and dataclasses.
        run_id: By which `load` knows whose it is.
        step: The number of steps taken.
        trace: Of the releases so far.
        last_norms: Norms for importance samples, which are private and no release.
    """
    facts = json.dumps({"run_id": run_id, "step": step, "trace": [asdict(row) for row in trace.rows]})
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in flatten(state).items()}
    norms = last_norms.to_tensor()
    if norms is not None:
        tensors[_LAST_NORMS] = norms
    metadata = {_FACTS: facts, _CHECKSUM: _checksum(facts, tensors)}
    _write(folder / CHECKPOINT, lambda path: save_file(tensors, path, metadata=metadata))


def load(
    folder: Path,
    start: S,
    *,
    run_id: str,
    last_norms: LastNorms,
    slices: Shards | None = None,
    content: bytes | None = None,
) -> tuple[S, int, Trace] | None:
    """The run's checkpoint, from which training goes on.

    A checkpoint that is damaged or of another run counts as none: the run's generator repeats from its first step what
    it drew before, so that nothing new is released.

    Args:
        folder: Of the run.
        start: The state before the first step, for structure and devices.
        run_id: Of the run.
        last_norms: Is restored.
        slices: Of the vectors in the state, if processes hold slices.
        content: Of the checkpoint of another process, in place of a file in `folder`.

    Returns:
        The state, the number of steps taken and the trace; None if there is no checkpoint.

    Raises:
        RefusedError: If the checkpoint has tensors of other shapes.
    """
    if content is None and not (folder / CHECKPOINT).exists():
        return None
    expected = flatten(start)
    try:
        metadata, tensors = _read_file(folder / CHECKPOINT) if content is None else _parse(content)
    except SafetensorError:
        metadata, tensors = {}, {}
    is_whole = metadata.get(_CHECKSUM) == _checksum(metadata.get(_FACTS, ""), tensors)
    facts = json.loads(metadata[_FACTS]) if is_whole else {}
    if facts.get("run_id") != run_id:
        _LOG.warning(
            "the checkpoint in %s is %s: training begins again with the same noise, at no further cost",
            folder,
            "of another run" if is_whole else "damaged",
        )
        return None
    norms = tensors.pop(_LAST_NORMS, None)  # no part of the state, and given back only once all else fits
    for name in sorted({*tensors, *expected}):
        stored, wanted = (
            _form(by_name[name]) if name in by_name else "missing" for by_name in (tensors, expected)
        )
        if stored != wanted:
            raise RefusedError(
                "{name} is {stored} in the checkpoint in {folder}, but {wanted} in this run; go on with the"
                " version that wrote it, or forfeit that run and start a new one.",
                code="checkpoint_differs",
                name=name,
                stored=stored,
                folder=folder,
                wanted=wanted,
            )
    if norms is not None:
        last_norms.restore(norms)
    placed = {name: _placed_like(expected[name], tensor, slices) for name, tensor in tensors.items()}
    return unflatten(start, placed), facts["step"], Trace([ReleaseRow(**row) for row in facts["trace"]])


def _read_file(file: Path) -> tuple[Mapping[str, str], dict[str, Tensor]]:
    with safe_open(file, framework="pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no mapping
        return opened.metadata() or {}, tensors


def _parse(content: bytes) -> tuple[Mapping[str, str], dict[str, Tensor]]:
    tensors = load_tensors(content)
    length = int.from_bytes(content[:8], "little")  # of the header, by the format of safetensors
    return json.loads(content[8 : 8 + length]).get("__metadata__", {}), tensors


def _placed_like(expected: Tensor, tensor: Tensor, slices: Shards | None) -> Tensor:
    if slices is not None and is_divided(expected):
        return slices.slice_of(tensor)
    return tensor.to(expected.device)


def collect(state: S, slices: Shards | None) -> S:
    """The state in the first process's main memory, where processes hold slices of its vectors."""
    if slices is None:
        return state
    parts = flatten(state).items()
    return unflatten(
        state, {name: slices.collect(part) if is_divided(part) else part for name, part in parts}
    )


def _checksum(facts: str, tensors: Mapping[str, Tensor]) -> str:
    """Protects the number of steps, among others: a wrong bit there would repeat steps that are paid for once."""
    digest = hashlib.sha256(facts.encode())
    for name in sorted(tensors):
        digest.update(f"{name} {_form(tensors[name])}".encode())
        digest.update(tensors[name].reshape(-1).view(torch.uint8).numpy().data)  # bytes as they are stored
    return digest.hexdigest()


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {list(tensor.shape)}"


def flatten(state: Any, prefix: str = "") -> dict[str, Tensor]:
    """The tensors of a dataclass (or mapping) of tensors and dataclasses, by dotted name."""
    tensors: dict[str, Tensor] = {}
    for _, key, value in _items(state):
        name = prefix + key
        tensors |= {name: value} if isinstance(value, Tensor) else flatten(value, name + ".")
    return tensors


def unflatten(state: S, tensors: Mapping[str, Tensor], prefix: str = "") -> S:
    """`state` with the tensors that `flatten` named replaced."""
    changes = {}
    for attribute, key, value in _items(state):
        name = prefix + key
        changes[attribute] = (
            tensors[name] if isinstance(value, Tensor) else unflatten(value, tensors, name + ".")
        )
    return changes if isinstance(state, Mapping) else replace(state, **changes)  # type: ignore


def _items(state: Any) -> Iterable[tuple[str, str, Any]]:
    """The attribute, the name in a checkpoint, and the value of each part of a state."""
    if isinstance(state, Mapping):
        return ((key, key, value) for key, value in state.items())
    return ((f.name, f.metadata.get(STORED_AS, f.name), getattr(state, f.name)) for f in fields(state))


def _write(path: Path, write: Callable[[Path], None]) -> None:
    """Write through a temporary file, so that a crash leaves either the old file or the new one."""
    fresh = path.with_name(path.name + ".new")
    write(fresh)
    fresh.chmod(0o600)  # before the rename: under its name it never was readable to others
    with fresh.open("rb") as file:
        os.fsync(file.fileno())
    fresh.replace(path)  # a rename is atomic, and durable once its folder is flushed
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def cpu_copies(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of named parameters on the CPU, for publication; contiguous, since safetensors writes no others."""
    contiguous = torch.contiguous_format
    return {name: torch.clone(part.detach().cpu(), memory_format=contiguous) for name, part in named.items()}

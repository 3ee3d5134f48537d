"""Crashes inside a checkpoint, and take-up where the number of records is private."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from algorithms.core import checkpoint, training
from algorithms.privacy.barrier.barrier import Barrier
from tests.support import bench
from tests.support.bench import StoppedError, algorithm, planned, small_model
from tests.support.refusals import refused_as


def trained(
    folder: Path, *, private: bool = False, stop_after: int | None = None
) -> tuple[torch.Tensor, Any]:
    sampling = {"expected_batch_size": None, "sampling_rate": 0.25} if private else {}
    method, model = algorithm("dp_sgd", **sampling), small_model()

    plan = planned(method, model, records=None) if private else planned(method, model)
    state, trace, _ = bench.trained(method, plan, model, folder, stop_after=stop_after)
    return method.released(state), trace.rows


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    for name in ("whole", "broken"):
        (tmp_path / name).mkdir()
    return tmp_path / "whole", tmp_path / "broken"


@pytest.mark.parametrize("nth", [1, 3])
def test_a_crash_while_a_file_is_written_leaves_the_checkpoint_before(
    nth: int, folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, broken = folders
    expected, _ = trained(whole)
    written = 0

    def tearing(tensors: Any, file: Path, **facts: Any) -> None:
        nonlocal written
        written += 1
        if written == nth:
            file.write_bytes(b"half")
            raise StoppedError
        save_file(tensors, file, **facts)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", tearing)
        with pytest.raises(StoppedError):
            trained(broken)
    assert torch.equal(trained(broken)[0], expected)


def test_a_checkpoint_of_another_shape_is_refused_by_what_differs(tmp_path: Path) -> None:
    with pytest.raises(StoppedError):
        trained(tmp_path, stop_after=2)
    path = tmp_path / checkpoint.CHECKPOINT
    with safe_open(path, framework="pt") as file:
        facts, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    name = next(name for name, tensor in tensors.items() if tensor.dim() == 1)
    shorter = tensors | {name: tensors[name][:-1].clone()}
    save_file(shorter, path, metadata=facts | {"sha256": checkpoint._checksum(facts["checkpoint"], shorter)})
    count = len(tensors[name])
    stored, wanted = (f"float32 of shape [{length}]" for length in (count - 1, count))
    with refused_as("checkpoint_differs", name=name, stored=stored, wanted=wanted):
        trained(tmp_path)


OPTIMIZER = {f"moving.{name}" for name in ("parameters", "first", "second", "average", "count")}


@pytest.mark.parametrize(
    ("name", "tensors"),
    [
        ("dp_sgd", OPTIMIZER | {"divisor"}),
        ("quantile_clipping", OPTIMIZER | {"divisor", "clip_norm"}),
        (
            "dpis",
            OPTIMIZER
            | {f"epoch.{part}" for part in ("expected_batch", "clip_norm", "fraction", "noise", "spent")},
        ),
        ("dp_agd", {"parameters", "average", "velocity", "gradient_rho", "reach", "window", "taken"}),
    ],
)
def test_tensors_have_the_names_of_checkpoints_written_before(name: str, tensors: set[str]) -> None:
    """A run that another version began goes on, whatever its fields are called now."""
    method, model = algorithm(name), small_model()
    state = method.init(model.initial_parameters(), planned(method, model))
    stored = checkpoint.flatten(state)
    assert set(stored) == tensors
    assert torch.equal(checkpoint.unflatten(state, stored).parameters, state.parameters)


@pytest.mark.parametrize(
    "damage",
    [(rb"step\": 1", rb"step\": 0"), (b"noise_std", b"noise_sdt"), (b'"F32"', b'"I32"'), (b"", None)],
)
def test_a_checkpoint_that_was_changed_counts_as_none(
    folders: tuple[Path, Path], damage: tuple[bytes, bytes | None]
) -> None:
    """A state with a smaller number of steps would be trained for more steps than were paid for."""
    whole, broken = folders
    expected, rows = trained(whole)
    with pytest.raises(StoppedError):
        trained(broken, stop_after=2)
    path, (old, new) = broken / checkpoint.CHECKPOINT, damage
    assert old in path.read_bytes()
    path.write_bytes(b"" if new is None else path.read_bytes().replace(old, new))
    released, again = trained(broken)
    assert torch.equal(released, expected) and again == rows


def test_a_released_count_survives_a_crash(folders: tuple[Path, Path]) -> None:
    whole, broken = folders
    expected, expected_rows = trained(whole, private=True)
    for stop_after in (2, 4):
        with pytest.raises(StoppedError):
            trained(broken, private=True, stop_after=stop_after)
    released, rows = trained(broken, private=True)
    assert torch.equal(released, expected)
    assert rows == expected_rows
    assert [row.kind for row in rows].count("total") == 1


@pytest.mark.parametrize("private", [False, True])
def test_training_tells_the_barrier_no_number_that_is_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, private: bool
) -> None:
    """By it the barrier chooses how it computes, which is seen in memory and time."""
    told = []

    def watched(*given: Any, **named: Any) -> Any:
        told.append(named["compute"].number)
        return Barrier(*given, **named)

    monkeypatch.setattr(training, "Hooks", partial(training.Hooks, barrier_of=watched))
    trained(tmp_path, private=private)
    assert told == [None if private else bench.RECORDS]

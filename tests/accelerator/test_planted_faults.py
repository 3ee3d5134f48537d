"""Mistakes that only a device shows, planted in the product one at a time: the simulated accelerator finds each."""

import inspect
import textwrap
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from algorithms.errors import QueryFailedError
from algorithms.gradients.devices import upload
from algorithms.privacy.barrier.barrier import Barrier
from algorithms.privacy.barrier.record_loader import RecordLoader
from algorithms.privacy.barrier.unnoised_queries import UnnoisedQueries
from tests.accelerator import simulator
from tests.accelerator.recorded_run import SUM, record, recorded


def plant(patch: pytest.MonkeyPatch, function: Callable[..., Any], line: str, instead: str) -> None:
    """Replace a line of a function, for all that have imported it."""
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(line) == 1
    names = dict(function.__globals__)
    exec(compile(source.replace(line, instead), inspect.getfile(function), "exec"), names)
    patch.setattr(function, "__code__", names[function.__name__].__code__)


def test_a_missing_wait_for_a_copy(sim: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, upload, "stream_in_use.wait_event(done)", "pass")
    with pytest.raises(
        QueryFailedError, match=r"race on the simulated device: .* nothing waits for the write"
    ):
        record("dp_sgd", streamed=True)


def test_a_missing_wait_where_records_are_streamed_is_told_in_full(
    sim: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is where the records fit: the made-up ones on which the text appears come the same way."""
    line = "return lambda: (moving[0](), moving[1]())"
    racing = "with torch.Stream(self.device): copy = inputs.pin_memory().to(self.device, non_blocking=True)"
    plant(monkeypatch, RecordLoader._begin_to_load, line, f"{racing}\n    return lambda: (copy, moving[1]())")
    record("dp_sgd")
    with pytest.raises(QueryFailedError, match="made-up records: RuntimeError: race on the simulated device"):
        record("dp_sgd", streamed=True)


def test_memory_that_is_used_again_too_early(sim: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    streaming = partial(record, "dp_sgd", streamed=True)
    assert simulator.races_in(streaming) == 0
    plant(monkeypatch, upload, "copy.record_stream(stream_in_use)", "pass")
    assert simulator.races_in(streaming) > 0


def test_a_pinned_buffer_that_is_overwritten_before_its_copy(
    sim: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = "copy = tensor.pin_memory().to(device, non_blocking=True)"
    early = "pinned = tensor.pin_memory(); copy = pinned.to(device, non_blocking=True); pinned.zero_()"
    plant(monkeypatch, upload, line, early)
    expected = recorded("dp_sgd", streamed=True, device="cpu").released
    assert not torch.allclose(record("dp_sgd", streamed=True).released, expected, rtol=0, atol=1e-3)


def test_a_tensor_of_the_host_in_a_sum(sim: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    line = "total += torch.where(is_right, part, 0.0)"
    plant(
        monkeypatch, UnnoisedQueries._sum_on_device, line, "total += torch.where(is_right, part, 0.0).cpu()"
    )
    with pytest.raises(QueryFailedError, match="at least two devices, sim:0 and cpu"):
        record("dp_sgd")


def test_a_wait_between_passes(sim: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    line = "are_right.append(is_right)"
    plant(monkeypatch, UnnoisedQueries._sum_on_device, line, "are_right.append(is_right); bool(is_right)")
    passes = 9  # of 256 records each, for 2,056
    assert record("dp_sgd", streamed=True).step.waits == dict.fromkeys(SUM, 1 + passes)


def test_records_that_are_copied_before_their_charge(
    sim: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    gradient = Barrier.gradient

    def early(self: Any, *args: Any, **kwargs: Any) -> Any:
        queries = self._Barrier__unnoised
        queries.compute.loader.load(queries.records, np.arange(4))
        return gradient(self, *args, **kwargs)

    monkeypatch.setattr(Barrier, "gradient", early)
    copies = record("dp_sgd", streamed=True).copies_of_records()
    assert copies.count(False) == 3

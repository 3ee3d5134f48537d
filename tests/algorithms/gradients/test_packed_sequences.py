"""Recurrent layers on packed sequences: the gradients of PyTorch's own, from full passes of one shape."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from algorithms.gradients import RecordsNotIndependentError, model_inspection
from tests.algorithms.gradients.zoo import Spec, Wired, check, problem

WORDS, LENGTH = 7, 6
Packed = tuple[PackedSequence, Any]


def _lengths(words: Tensor) -> Tensor:
    return (words != 0).sum(1).clamp(min=1).cpu()


def _last_state(_words: Tensor, outputs: Packed) -> Tensor:
    states = outputs[1][0] if isinstance(outputs[1], tuple) else outputs[1]
    found: Tensor = states.transpose(0, 1).flatten(1)
    return found


def _last_cell(_words: Tensor, outputs: Packed) -> Tensor:
    found: Tensor = outputs[1][1][-1]
    return found


def _mean(_words: Tensor, outputs: Packed) -> Tensor:
    padded, lengths = pad_packed_sequence(outputs[0], batch_first=True)
    return padded.sum(1) / lengths[:, None].to(padded)


def _largest(_words: Tensor, outputs: Packed) -> Tensor:
    return pad_packed_sequence(outputs[0], batch_first=True, padding_value=-1e9)[0].amax(1)


def _every_step(words: Tensor, outputs: Packed) -> Tensor:
    return pad_packed_sequence(outputs[0], batch_first=True, total_length=words.shape[1])[0].flatten(1)


def _mean_over_the_longest(_words: Tensor, outputs: Packed) -> Tensor:
    return pad_packed_sequence(outputs[0], batch_first=True)[0].mean(1)


def _sorted_here(self: Wired, words: Tensor) -> Tensor:
    """By lengths, as before `enforce_sorted` could be given."""
    lengths, order = _lengths(words).sort(descending=True)
    packed = pack_padded_sequence(self.table(words)[order], lengths, batch_first=True)
    return _last_state(words, self.layer(packed))[order.argsort()]


def packing(read: Callable[[Tensor, Packed], Tensor], layer: nn.RNNBase) -> Spec:
    def wiring(self: Wired, words: Tensor) -> Tensor:
        embedded = self.table(words)
        packed = pack_padded_sequence(
            embedded if layer.batch_first else embedded.transpose(0, 1),
            _lengths(words),
            batch_first=layer.batch_first,
            enforce_sorted=False,
        )
        return read(words, self.layer(packed))

    return Spec(lambda: Wired(wiring, table=nn.Embedding(WORDS, 3), layer=layer), (LENGTH,), entries=WORDS)


SPECS = {
    "last state": packing(_last_state, nn.LSTM(3, 2, batch_first=True)),
    "last cell": packing(_last_cell, nn.LSTM(3, 2, 2)),
    "last states of two directions": packing(_last_state, nn.GRU(3, 2, 2, bidirectional=True)),
    "mean": packing(_mean, nn.GRU(3, 2, bias=False, batch_first=True, bidirectional=True)),
    "largest": packing(_largest, nn.RNN(3, 2, batch_first=True)),
    "every step": packing(_every_step, nn.RNN(3, 2, nonlinearity="relu", batch_first=True)),
    "sorted by the model": Spec(
        lambda: Wired(_sorted_here, table=nn.Embedding(WORDS, 3), layer=nn.LSTM(3, 2, batch_first=True)),
        (LENGTH,),
        entries=WORDS,
    ),
}


@pytest.mark.parametrize("light", [0, model_inspection._LIGHT])
@pytest.mark.parametrize("name", SPECS)
def test_packed_sequences_are_taken_in_full_passes(
    name: str, light: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by the brief inspection of large models."""
    monkeypatch.setattr(model_inspection, "_LIGHT", light)
    made = problem(SPECS[name], count=12)
    engine = made.engine()
    assert engine.is_batched and engine.physical_batch > 1
    check(made, engine)


def test_a_mean_that_depends_on_the_longest_sequence_is_refused() -> None:
    with pytest.raises(RecordsNotIndependentError, match="mixes records"):
        problem(packing(_mean_over_the_longest, nn.GRU(3, 2, batch_first=True))).engine()


def test_packed_data_that_the_model_changes_are_taken_one_record_at_a_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def wiring(self: Wired, words: Tensor) -> Tensor:
        data, *rest = pack_padded_sequence(
            self.table(words), _lengths(words), batch_first=True, enforce_sorted=False
        )
        return _last_state(words, self.layer(PackedSequence(torch.tanh(data), *rest)))

    layer = nn.GRU(3, 2, batch_first=True)
    made = problem(
        Spec(lambda: Wired(wiring, table=nn.Embedding(WORDS, 3), layer=layer), (LENGTH,), entries=WORDS)
    )
    engine = made.engine()
    assert engine.physical_batch == 1 and "(pack_padded_sequence)" in caplog.text
    check(made, engine)

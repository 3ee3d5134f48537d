"""Records that are not first, that are folded into other dimensions, packed, or taken another way each time."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from algorithms.gradients import L2, RecordsNotIndependentError
from algorithms.gradients.grad_sample_recorder import Layout, layout_of
from algorithms.gradients.model_inspection import InspectionLimits
from algorithms.gradients.rules import recurrent
from tests.support.gradients.problems import BRIEF, SMALL, Spec, Wired, by_limits, check, problem
from tests.support.soak import soak_but


def _time_first(self: Wired, inputs: Tensor) -> Tensor:
    return self.last(torch.tanh(self.norm(self.layer(inputs.transpose(0, 1))))).sum(dim=0)


def _folded(self: Wired, inputs: Tensor) -> Tensor:
    """Records first, then time, in one dimension."""
    batch, length, width = inputs.shape
    hidden = torch.tanh(self.norm(self.layer(inputs.reshape(-1, width))))
    return self.last(hidden).view(batch, length, -1).sum(dim=1)


def _folded_by_time(self: Wired, inputs: Tensor) -> Tensor:
    """Time first, then records, in one dimension, where they lie far apart."""
    batch, length, width = inputs.shape
    hidden = torch.tanh(self.norm(self.layer(inputs.transpose(0, 1).reshape(-1, width))))
    return self.last(hidden).view(length, batch, -1).sum(dim=0)


def _folded_behind(self: Wired, inputs: Tensor) -> Tensor:
    """Records, then time, in the second dimension; a matrix for each index of the first."""
    both = torch.stack([inputs, -inputs]).flatten(1, 2)
    mixed = torch.tanh(torch.bmm(both, self.table.weight[:8].view(2, 4, 4)) + self.first)
    return self.last(self.norm(self.layer(mixed))).view(2, *inputs.shape[:2], -1).sum(dim=(0, 2))


def _last(self: Wired, inputs: Tensor) -> Tensor:
    """Records last."""
    hidden = torch.tanh(self.norm(self.layer(inputs.movedim(0, -2))))
    return self.last(hidden).movedim(-2, 0).sum(dim=1)


def _twice(self: Wired, inputs: Tensor) -> Tensor:
    """All records, and all of them upside down, in one dimension."""
    both = torch.cat([inputs, -inputs]).sum(dim=1)
    hidden = torch.tanh(self.norm(self.layer(both)))
    return self.last(hidden[: len(inputs)] + 2.0 * hidden[len(inputs) :])


def _time_steps(self: Wired, inputs: Tensor) -> Tensor:
    """One call for each time."""
    steps = [torch.tanh(self.norm(self.layer(step))) for step in inputs.unbind(dim=1)]
    return self.last(torch.stack(steps)).sum(dim=0)


def _one_after_the_other(self: Wired, inputs: Tensor) -> Tensor:
    """One call for each record."""
    return torch.stack([_folded(self, inputs[i : i + 1])[0] for i in range(len(inputs))])


def _expanded(self: Wired, inputs: Tensor) -> Tensor:
    """A place in front of each record whose value is trained: the size of the batch is an argument."""
    first = self.first.expand(len(inputs), 1, -1)
    return self.last(torch.tanh(self.norm(self.layer(torch.cat([first, inputs], dim=1))))).sum(dim=1)


def _repeated(self: Wired, inputs: Tensor) -> Tensor:
    first = self.first[None].repeat(len(inputs), 1, 1)
    return self.last(torch.tanh(self.norm(self.layer(inputs + first)))).sum(dim=1)


def _indexed(self: Wired, inputs: Tensor) -> Tensor:
    """Positions of a table that is longer than the records."""
    places = torch.arange(inputs.shape[1]).expand(len(inputs), -1)
    return self.last(torch.tanh(self.norm(self.layer(inputs + self.table(places))))).sum(dim=1)


def _checkpointed(self: Wired, inputs: Tensor) -> Tensor:
    return self.last(torch.tanh(self.norm(checkpoint(self.layer, inputs, use_reentrant=False)))).sum(dim=1)


def _compared(self: Wired, inputs: Tensor) -> Tensor:
    """Records with others in one product, whose sum is of each record alone."""
    hidden = self.norm(self.layer(inputs))
    return self.last(torch.einsum("btf,btg->bfg", hidden, hidden).flatten(1)[:, :5])


WIRINGS = {
    "time first": _time_first,
    "folded": _folded,
    "folded by time": _folded_by_time,
    "folded behind": _folded_behind,
    "records last": _last,
    "all twice": _twice,
    "by time": _time_steps,
    "by record": _one_after_the_other,
    "with a trained place": _expanded,
    "with trained places": _repeated,
    "with positions": _indexed,
    "with checkpoints": _checkpointed,
    "with a product": _compared,
}


def _spec(wiring: Callable[..., Tensor], length: int) -> Spec:
    return Spec(
        lambda: Wired(
            wiring,
            layer=nn.Linear(4, 5),
            norm=nn.LayerNorm(5),
            last=nn.Linear(5, 2),
            first=nn.Parameter(torch.randn(1, 4)),
            table=nn.Embedding(9, 4),
        ),
        (length, 4),
    )


@pytest.mark.parametrize(
    ("name", "length", "limits"),
    soak_but(
        [
            *((name, 3, BRIEF) for name in WIRINGS if name != "by record"),
            *((name, 1, BRIEF) for name in list(WIRINGS)[:3]),
            *(("by record", length, BRIEF) for length in (1, 3)),
            ("folded by time", 3, InspectionLimits()),
        ],
        [
            (name, length, limits)
            for name in WIRINGS
            for length in (1, 3, 5)
            for limits in (BRIEF, InspectionLimits())
        ],
    ),
)
def test_records_are_found_wherever_they_are(name: str, length: int, limits: InspectionLimits) -> None:
    """Also where there are as many places as records, which no shape tells apart."""
    made = problem(_spec(WIRINGS[name], length))
    engine = made.engine(physical_batch=SMALL, limits=limits)
    assert engine.is_batched == (name != "by record")
    for count in (1, 3, 5, 6):
        check(made.take(slice(0, count)), engine)


IMAGES = {
    "frames folded by time": Spec(
        lambda: Wired(
            lambda self, x: self.norm(self.layer(x.transpose(0, 1).flatten(0, 1))).view(3, len(x), -1).sum(0),
            layer=nn.Conv2d(2, 4, 3),
            norm=nn.GroupNorm(2, 4),
        ),
        (3, 2, 4, 4),
    ),
    "channels last": Spec(
        lambda: Wired(
            lambda self, x: self.layer(x.contiguous(memory_format=torch.channels_last)),
            layer=nn.Conv2d(2, 3, 3, padding=1),
        ),
        (2, 5, 5),
    ),
    "viewed around max pooling": Spec(
        lambda: Wired(
            lambda self, x: self.pool(self.layer(x) + self.scale.view(3, 1, 4)).view(len(x), -1),
            layer=nn.Conv2d(2, 3, 2),
            pool=nn.MaxPool2d(1),
            scale=nn.Parameter(torch.randn(1, 3, 2, 2)),
        ),
        (2, 5, 5),
    ),
    "turned": Spec(
        lambda: Wired(lambda self, x: self.layer(x.mT).mT, layer=nn.Conv2d(2, 3, (2, 3))), (2, 4, 5)
    ),
}


@pytest.mark.parametrize("name", IMAGES)
def test_images_are_found_wherever_they_are(name: str) -> None:
    made = problem(IMAGES[name])
    engine = made.engine(limits=InspectionLimits() if name == "viewed around max pooling" else BRIEF)
    assert engine.is_batched
    for count in (1, 3, 4):
        check(made.take(slice(0, count)), engine)


@pytest.mark.parametrize(
    ("few", "more", "expected"),
    [
        ((3, 4), (5, 4), Layout(0)),
        ((4, 3), (4, 5), Layout(1)),
        ((3, 3), (5, 3), Layout(0)),
        ((12, 2), (20, 2), Layout(0, 4)),
        ((3, 5), (5, 5), Layout(0)),
        ((4, 2), (4, 2), None),
        ((3, 3), (5, 5), None),
        ((4, 2), (6, 2), None),
        ((3,), (5, 1), None),
        ((), (), None),
    ],
)
def test_a_layout_follows_from_two_shapes(
    few: tuple[int, ...], more: tuple[int, ...], expected: Layout | None
) -> None:
    assert layout_of(few, more, 3, 5) == expected


@pytest.mark.parametrize("layout", [Layout(0), Layout(1), Layout(2), Layout(0, 2), Layout(1, 2)])
def test_a_layout_takes_records_apart_and_puts_one_back(layout: Layout) -> None:
    ones = [torch.randn(6, 3, 4, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    parts = [
        one.movedim(0, layout.dimension)[(slice(None),) * layout.dimension + (slice(layout.rows_per_record),)]
        for one in ones
    ]
    whole = torch.cat(parts, dim=layout.dimension)
    found = layout.by_record(whole, 4)
    assert len(found) == 4
    for one, record in zip(parts, found, strict=True):
        assert torch.equal(layout.alone(record), one)
        assert len(record) == layout.rows_per_record or layout.rows_per_record == 1


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


def _changed(self: Wired, words: Tensor) -> Tensor:
    """Between the layers, padding included, as by dropout on the data."""
    data, *rest = pack_padded_sequence(
        self.table(words), _lengths(words), batch_first=True, enforce_sorted=False
    )
    outputs = self.layer(PackedSequence(torch.tanh(data + 1.0), *rest))[0]
    return _mean(words, (outputs._replace(data=outputs.data + 1.0), None))


def _beside_plain(kind: Callable[..., nn.RNNBase]) -> Spec:
    """Packed sequences, and the same words through a layer of another kind as they are, padding included."""

    def wiring(self: Wired, words: Tensor) -> Tensor:
        embedded = self.table(words)
        packed = pack_padded_sequence(embedded, _lengths(words), batch_first=True, enforce_sorted=False)
        state, plain = _last_state(words, self.layer(packed)), self.plain(embedded)[0].flatten(1)
        return torch.cat([state, plain], dim=1)

    def make() -> nn.Module:
        layer, plain = nn.GRU(3, 2, batch_first=True), kind(3, 2, batch_first=True)
        return Wired(wiring, table=nn.Embedding(WORDS, 3), layer=layer, plain=plain)

    return Spec(make, (LENGTH,), entries=WORDS)


def partly_frozen(layer: nn.RNNBase) -> nn.RNNBase:
    for name, part in layer.named_parameters():
        part.requires_grad_("weight_ih" not in name and "bias_hh" not in name)
    return layer


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

    def make() -> nn.Module:
        layer.reset_parameters()  # by the seed of the problem; rectified units drawn by chance may all be off
        return Wired(wiring, table=nn.Embedding(WORDS, 3), layer=layer)

    return Spec(make, (LENGTH,), entries=WORDS)


SPECS = {
    "last state": packing(_last_state, nn.LSTM(3, 2, batch_first=True)),
    "last cell": packing(_last_cell, nn.LSTM(3, 2, 2)),
    "last states of two directions": packing(_last_state, nn.GRU(3, 2, 2, bidirectional=True)),
    "last cells of two directions": packing(
        lambda _words, outputs: outputs[1][1].transpose(0, 1).flatten(1),
        nn.LSTM(3, 2, 2, batch_first=True, bidirectional=True),
    ),
    "partly frozen": packing(
        _last_state, partly_frozen(nn.LSTM(3, 2, 2, batch_first=True, bidirectional=True))
    ),
    "mean": packing(_mean, nn.GRU(3, 2, bias=False, batch_first=True, bidirectional=True)),
    "largest": packing(_largest, nn.RNN(3, 2, batch_first=True)),
    "every step": packing(_every_step, nn.RNN(3, 2, nonlinearity="relu", batch_first=True)),
    "projected": packing(_last_state, nn.LSTM(3, 4, 2, batch_first=True, bidirectional=True, proj_size=2)),
    "projected, without biases": packing(_mean, nn.LSTM(3, 4, bias=False, batch_first=True, proj_size=2)),
    "with data that the model changes": Spec(
        lambda: Wired(_changed, table=nn.Embedding(WORDS, 3), layer=nn.GRU(3, 2, batch_first=True)),
        (LENGTH,),
        entries=WORDS,
    ),
    "beside a plain GRU": _beside_plain(nn.GRU),
    "beside a plain LSTM": _beside_plain(nn.LSTM),
    "sorted by the model": Spec(
        lambda: Wired(_sorted_here, table=nn.Embedding(WORDS, 3), layer=nn.LSTM(3, 2, batch_first=True)),
        (LENGTH,),
        entries=WORDS,
    ),
}


PACKED = [
    "projected",
    "last state",
    "last cells of two directions",
    "mean",
    "largest",
    "sorted by the model",
    "with data that the model changes",
    "beside a plain GRU",
]


@pytest.mark.parametrize(
    ("name", "limits"),
    [
        *by_limits(PACKED, in_full=["last state"]),
        *(
            pytest.param(name, InspectionLimits(), marks=pytest.mark.soak)
            for name in SPECS
            if name not in PACKED
        ),
    ],
)
def test_packed_sequences_are_taken_in_full_passes(name: str, limits: InspectionLimits) -> None:
    """Also by the brief inspection of large models."""
    made = problem(SPECS[name], count=12)
    engine = made.engine(limits=limits)
    assert engine.is_batched and engine.physical_batch > 1
    check(made, engine)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_steps_of_packed_sequences_are_computed_together(
    kind: Callable[..., nn.RNNBase], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = problem(packing(_last_state, kind(3, 2, batch_first=True, bidirectional=True)))
    engine = made.engine(limits=BRIEF)

    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError("one cell a step")

    monkeypatch.setattr(recurrent, "_unroll", refused)
    assert engine.clipped_sum(*made.arguments, L2(1.0)).norm() > 0


def test_a_mean_that_depends_on_the_longest_sequence_is_refused() -> None:
    with pytest.raises(RecordsNotIndependentError, match="mixes records"):
        problem(packing(_mean_over_the_longest, nn.GRU(3, 2, batch_first=True))).engine()


def test_packed_sequences_of_another_length_are_taken_one_record_at_a_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def longer(_words: Tensor, outputs: Packed) -> Tensor:
        return pad_packed_sequence(outputs[0], batch_first=True, total_length=LENGTH + 1)[0].flatten(1)

    made = problem(packing(longer, nn.GRU(3, 2, batch_first=True)))
    engine = made.engine()
    assert engine.physical_batch == 1 and "(pack_padded_sequence)" in caplog.text
    check(made, engine)

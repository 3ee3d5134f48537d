"""What kind of model this is, found out on made-up inputs before a private record is seen.

Records must not touch each other, or no record's gradient can be clipped. A model whose passes can be recorded is known
by where its records lie in each tensor, and by giving the same gradients as autograd.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from algorithms.gradients.layout import Layout, layout_of
from algorithms.gradients.mixing import Unclippable, check_apart, mixing_layer, unchanged
from algorithms.gradients.passes import Passes
from algorithms.gradients.sample import Sample, away_from_start, same_randomness
from algorithms.gradients.tape import Tape, Unrecorded

Layouts = tuple[Layout | None, ...]

_FEW, _MORE = 3, 5
_ROUNDS = 4
_TOLERANCE = 1e-3
"""Relative to a parameter's gradient; rounding stays below it, a part that is left out or misplaced far above."""

_ROUNDING = 1e-6
"""Relative to the whole gradient: what rounding makes of a gradient that is zero."""


@dataclass(frozen=True)
class Examined:
    """What an examination found.

    layouts: of the tensors that the rules ask about; None where passes cannot be recorded, for the `reason` given.
    bytes_per_record: what a pass keeps for each record. without_rule: operations that are taken record by record.
    """

    layouts: Layouts | None
    reason: str
    bytes_per_record: int
    without_rule: tuple[str, ...] = ()


def examine(passes: Passes, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Examined:
    """Finds how to take a model's per-example gradients. Raises Unclippable where records mix."""
    offender = mixing_layer(passes.model.module)
    if offender is not None:
        raise Unclippable(f"the layer {offender} mixes records")
    if not passes.model.shapes:
        raise Unclippable(f"the model {passes.model.name} has no parameters to train")
    parameters = away_from_start(passes.model).to(device)
    few, more = (Sample.draw(count, shape, dtype, device, seed=0) for count in (_FEW, _MORE))
    with unchanged(passes.model.module):
        exact = Passes(replace(passes.model, precision=torch.float32))  # bfloat16 would hide differences
        check_apart(exact, parameters, few, Sample.draw(_FEW, shape, dtype, device, seed=1))
        sizes = [_kept_bytes(passes, parameters, sample) for sample in (few, more)]
        each = max(1, (sizes[1] - sizes[0]) // (_MORE - _FEW))
        try:
            layouts, without_rule = _learn(passes, parameters, few, more)
            _check_gradients(exact, parameters, few, layouts)
        except Unrecorded as reason:
            return Examined(None, str(reason), each + 4 * len(parameters))
    return Examined(layouts, "", each, without_rule)


def _learn(passes: Passes, parameters: Tensor, few: Sample, more: Sample) -> tuple[Layouts, tuple[str, ...]]:
    """Where the records are, from the shapes at two batch sizes, and which operations have no rule.

    A rule that knows where its records are may ask about more tensors, so this is repeated until nothing changes.
    """
    layouts: Layouts = ()
    for _ in range(_ROUNDS):
        tapes = [_record(passes, parameters, sample, layouts) for sample in (few, more)]
        learned = _layouts(tapes[0].shapes, tapes[1].shapes)
        if learned == layouts:
            break
        layouts = learned
    return layouts, tuple(sorted(tapes[0].without_rule))


def _record(passes: Passes, parameters: Tensor, sample: Sample, layouts: Layouts) -> Tape:
    with same_randomness():
        return passes.taped(parameters, sample.inputs, sample.labels, layouts, is_learning=True)[1]


def _layouts(few: list[tuple[int, ...]], more: list[tuple[int, ...]]) -> Layouts:
    if len(few) != len(more):
        raise Unrecorded("the model uses its parameters differently for another number of records")
    return tuple(layout_of(a, b, _FEW, _MORE) for a, b in zip(few, more, strict=True))


def _check_gradients(passes: Passes, parameters: Tensor, sample: Sample, layouts: Layouts) -> None:
    """Raises Unrecorded where a weighted sum of the recorded gradients is not what autograd makes of it."""
    weights = torch.linspace(0.5, 2.0, len(sample.labels), dtype=torch.float64, device=parameters.device)
    start = parameters.clone().requires_grad_()
    with same_randomness(), torch.enable_grad():
        outputs = passes.model.outputs(passes.model.named(start), sample.inputs)
        losses = passes.model.losses(outputs, sample.labels)
        (expected,) = torch.autograd.grad((losses * weights).sum(), start)
    with same_randomness():
        found = passes.recorded(parameters, sample.inputs, sample.labels, layouts)
    differences = found.weighted_sum(weights) - expected
    floor = _ROUNDING * float(torch.linalg.vector_norm(expected))
    for place in passes.model.places.values():
        size = float(torch.linalg.vector_norm(expected[place]))
        if not float(torch.linalg.vector_norm(differences[place])) <= _TOLERANCE * size + floor:
            raise Unrecorded("gradients that are not those of autograd when they are recorded")


def _kept_bytes(passes: Passes, parameters: Tensor, sample: Sample) -> int:
    """What autograd keeps for a backward pass, in bytes."""
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    start = parameters.clone().requires_grad_()
    with same_randomness(), torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        outputs = passes.model.outputs(passes.model.named(start), sample.inputs)
        passes.model.losses(outputs, sample.labels).sum()
    return sum(kept.values())

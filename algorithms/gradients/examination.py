"""What kind of model this is, found out on made-up inputs before a private record is seen.

Records must not touch each other, or no record's gradient can be clipped. A model whose passes can be recorded is known
by where its records lie in each tensor, and by giving the same gradients as autograd.
"""

import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from algorithms.gradients.clipping import L2
from algorithms.gradients.layout import Layout, Unrecorded, layout_of
from algorithms.gradients.mixing import Looked, Unclippable, check_apart, check_state, mixing_layer
from algorithms.gradients.passes import Passes
from algorithms.gradients.sample import Form, Sample, away_from_start, same_randomness
from algorithms.gradients.tape import Tape
from algorithms.gradients.watch import watched, watching

Layouts = tuple[Layout | None, ...]

_FEW, _MORE = 3, 17
_ROUNDS = 4
_BYTE = 256
"""Whole numbers that are tried where no table says how many there are."""
_SPECIAL = 8
"""The first entries of a table, among which paddings and other marks usually are."""
_ROUNDING = 1e-2
"""Of the tolerance, relative to the whole gradient: what rounding makes of a parameter's gradient that is zero."""


@dataclass(frozen=True)
class Examined:
    """What an examination found.

    form: of the made-up records. is_narrow: whether 16 bits were used.
    layouts: of the tensors that the rules ask about; None where passes cannot be recorded, for the `reason` given.
    bytes_per_record: what a pass keeps for each record. written_bytes: what its gradient takes as far as it is written
    down. is_random: whether the model draws random numbers. without_rule: operations that are taken record by record.
    """

    form: Form
    is_narrow: bool
    layouts: Layouts | None
    reason: str
    bytes_per_record: int
    written_bytes: int
    is_random: bool
    without_rule: tuple[str, ...] = ()


def examine(passes: Passes, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Examined:
    """Finds how to take a model's per-example gradients. Raises Unclippable where records mix."""
    offender = mixing_layer(passes.model.module)
    if offender is not None:
        raise Unclippable(f"the layer {offender} mixes records")
    if not passes.model.shapes:
        raise Unclippable(f"the model {passes.model.name} has no parameters to train")

    parameters = away_from_start(passes.model).to(device)
    form = _form(passes, parameters, Form(shape, dtype, device))
    few, more = form.draw(_FEW, 0), form.draw(_MORE, 0)
    exact = _exact(passes, parameters, few)
    is_exact = exact.parameters.dtype == torch.float64

    def draw_exactly(count: int, seed: int) -> Sample:
        return form.draw(count, seed).in_64_bits() if is_exact else form.draw(count, seed)

    check_state(exact, draw_exactly(_FEW, 0))
    is_random = check_apart(exact, draw_exactly, () if dtype.is_floating_point else form.constants)
    is_narrow = watched(passes, parameters, few).is_narrow
    sizes = [_kept_bytes(passes, parameters, sample) for sample in (few, more)]
    each = max(1, (sizes[1] - sizes[0]) // (_MORE - _FEW))
    try:
        layouts, without_rule = _learn(passes, parameters, few, more)
        for count in (_FEW, _MORE):
            _check_gradients(exact, draw_exactly(count, 0), layouts)
        written = _written_bytes(passes, parameters, few, layouts)
    except Unrecorded as reason:
        _check_alone(passes, parameters, few)
        return Examined(form, is_narrow, None, str(reason), each, 4 * len(parameters), is_random)
    return Examined(form, is_narrow, layouts, "", each, written, is_random, without_rule)


def _form(passes: Passes, parameters: Tensor, least: Form) -> Form:
    """The form with all entries of the model's tables, or of a byte, and all labels, as far as the model takes them."""
    layers = [
        layer for layer in passes.model.module.modules() if isinstance(layer, nn.Embedding | nn.EmbeddingBag)
    ]
    paddings = {layer.padding_idx for layer in layers if layer.padding_idx is not None}
    tables = sorted({layer.num_embeddings for layer in layers} or {_BYTE}, reverse=True)
    forms = (_with_entries(least, entries, paddings) for entries in tables)
    form = next((form for form in forms if _takes(passes, parameters, form)), least)
    outputs = _outputs(passes, parameters, form.draw(1, 0))
    labelled = replace(form, classes=min(max(2, outputs.shape[-1]), _MORE))
    return labelled if _takes(passes, parameters, labelled) else form


def _with_entries(form: Form, entries: int, paddings: set[int]) -> Form:
    constants = {*paddings, *range(_SPECIAL), entries - 1}
    return replace(form, entries=entries, constants=tuple(sorted(c for c in constants if c < entries)))


def _outputs(passes: Passes, parameters: Tensor, sample: Sample) -> Tensor:
    with torch.no_grad(), same_randomness():
        return passes.model.outputs(passes.model.named(parameters), sample.inputs)


def _takes(passes: Passes, parameters: Tensor, form: Form) -> bool:
    """Whether a model has losses for records of a form."""
    sample = form.draw(_MORE, 0)
    try:
        with same_randomness():
            passes.losses(parameters, sample.inputs, sample.labels)
    except Exception:
        return False
    return True


def _exact(passes: Passes, parameters: Tensor, sample: Sample) -> Looked:
    """The model in 64 bits, where rounding hides no difference; as it is where its code insists on its own types."""
    plain = replace(passes.model, precision=torch.float32)
    wider = replace(plain, module=copy.deepcopy(plain.module).double())
    looked = Looked(Passes(wider), parameters.double(), tolerance=1e-9)
    try:
        looked.losses(sample.in_64_bits())
    except RuntimeError:
        return Looked(Passes(plain), parameters, tolerance=1e-4)
    return looked


def _check_alone(passes: Passes, parameters: Tensor, sample: Sample) -> None:
    """Raises Unclippable where even single records cannot be differentiated."""
    try:
        passes.one_by_one(parameters, sample.inputs, sample.labels)
    except RuntimeError as reason:
        why = str(reason).partition("\n")[0]
        name = passes.model.name
        raise Unclippable(f"the model {name} cannot be differentiated record by record ({why})") from reason


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
    for other in (more.times(1e3), more.times(0.0), more.with_holes()):
        if _record(passes, parameters, other, layouts).shapes != tapes[1].shapes:
            raise Unrecorded("a size that follows from the values of the records")
    return layouts, tuple(sorted(tapes[0].without_rule))


def _record(passes: Passes, parameters: Tensor, sample: Sample, layouts: Layouts) -> Tape:
    with watching() as watch:
        tape = passes.taped(parameters, sample.inputs, sample.labels, layouts, is_learning=True)[1]
    if watch.has_looked:
        raise Unrecorded("a look at the values of a tensor, on which the way through the model may depend")
    return tape


def _layouts(few: list[tuple[int, ...]], more: list[tuple[int, ...]]) -> Layouts:
    if len(few) != len(more):
        raise Unrecorded("the model uses its parameters differently for another number of records")
    return tuple(layout_of(a, b, _FEW, _MORE) for a, b in zip(few, more, strict=True))


def _check_gradients(looked: Looked, sample: Sample, layouts: Layouts) -> None:
    """Raises Unrecorded where a weighted sum of the recorded gradients is not what autograd makes of it."""
    passes, start = looked.passes, looked.parameters.clone().requires_grad_()
    weights = torch.linspace(0.5, 2.0, len(sample.labels), dtype=torch.float64, device=start.device)
    with same_randomness():
        losses = passes.followed(start, sample.inputs, sample.labels)
        expected = passes.back(start, (losses * weights).sum())
    if expected is None:
        raise Unrecorded("a loss that depends on no parameter")
    with same_randomness():
        found = passes.recorded(looked.parameters, sample.inputs, sample.labels, layouts)
    differences = found.weighted_sum(weights) - expected
    floor = _ROUNDING * looked.tolerance * float(torch.linalg.vector_norm(expected))
    for place in passes.model.places.values():
        size = float(torch.linalg.vector_norm(expected[place]))
        if not float(torch.linalg.vector_norm(differences[place])) <= 10.0 * looked.tolerance * size + floor:
            raise Unrecorded("gradients that are not those of autograd when they are recorded")


def _written_bytes(passes: Passes, parameters: Tensor, sample: Sample, layouts: Layouts) -> int:
    """What measuring a record's gradient leaves written down, in bytes."""
    with same_randomness():
        found = passes.recorded(parameters, sample.inputs, sample.labels, layouts)
    found.norms(L2(1.0))
    return found.written_bytes // len(sample.labels)


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

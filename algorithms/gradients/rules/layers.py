"""Rules for linear layers, embeddings, normalisations and attention.

Multi-head attention as PyTorch's own layer computes it is linear layers before and after the attention itself.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from algorithms.gradients.arithmetic import wide
from algorithms.gradients.grad_sample_recorder import (
    Args,
    Func,
    Gradients,
    GradSampleRecorder,
    Kwargs,
    Layout,
    UnrecordedError,
)
from algorithms.gradients.parameter_gradients import (
    BiasGrad,
    DenseGrad,
    LinearGrad,
    PerExample,
    SlicedGrad,
)
from algorithms.gradients.rules.general import general, summed_to
from algorithms.gradients.table_gradients import BagGrad, EmbeddingGrad, SparseLinearGrad, dense_inputs


def linear(recorder: GradSampleRecorder, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """output = input weight^T + bias, for input [..., p], weight [o, p], bias [o]."""
    input, weight, bias = _arguments(*args, **kwargs)
    if recorder.name(input) is not None or weight.dim() == 1:
        return general(recorder, func, args, kwargs)
    layout = recorder.layout(input)
    names = recorder.name(weight), recorder.name(bias)
    # Whatever the number of records, so that a record's bits do not depend on it.
    is_large = weight.shape[1] * max(weight.shape[0], _ONEDNN_MIN_OUTPUTS) >= _ONEDNN_SIZE
    if is_large and names[0] is not None and _is_fast(input, weight, bias):
        func = FastLinear.apply
    output = func(input, weight, bias)
    return recorder.keep(
        output,
        lambda grad_outputs: linear_gradients(input, grad_outputs, layout, names, recorder.batch),
        input,
    )


_ONEDNN_SIZE, _ONEDNN_MIN_OUTPUTS = 2**14, 32
"""Size of a weight from which oneDNN is faster than PyTorch, to which fewer outputs cost as much as 32."""

_ONE_DNN: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
HAS_FAST_LINEAR = (
    torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    and torch.backends.cpu.get_cpu_capability() == "AVX512"
    and _ONE_DNN is not None
)
"""Whether `FastLinear` works here."""


def _is_fast(input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether `FastLinear` computes this layer; oneDNN reads a bias as numbers next to each other, whatever it is."""
    if bias is not None and not (bias.shape == weight.shape[:1] and bias.is_contiguous()):
        return False
    parts = (input, weight) if bias is None else (input, weight, bias)
    is_plain = all(part.dtype == torch.float32 and part.device.type == "cpu" for part in parts)
    return HAS_FAST_LINEAR and is_plain and not torch.is_autocast_enabled("cpu")


class FastLinear(torch.autograd.Function):
    """input weight^T + bias by oneDNN, for input [..., p], weight [o, p] and bias [o] or None; differentiable by input.

    PyTorch multiplies by MKL, which leaves half of AVX-512 unused on processors of AMD. Like MKL, oneDNN computes a row
    in the same way in every batch of a multiple of 64 rows.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
        ctx.save_for_backward(weight.t())  # what `linear` saves, which checkpointed layers compare
        return _ONE_DNN(input, weight, bias, "none", [], "")

    @staticmethod
    def backward(ctx: Any, grad_outputs: Tensor) -> Any:
        # The saved tensor is weight^T, and `apply` transposes it again: grad_outputs weight.
        return FastLinear.apply(grad_outputs, *ctx.saved_tensors, None), None, None  # type: ignore[no-untyped-call]


def sparse_linear(recorder: GradSampleRecorder, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """input weight^T for inputs with `numbers` [k] at `positions` [n, k], weight [o, p]; see `sparse_linear.py`."""
    positions, numbers, weight = args
    name, layout, batch = str(recorder.name(weight)), recorder.layout(positions), recorder.batch
    if recorder.layout_if_any(numbers) is not None or recorder.name(numbers) is not None:
        raise UnrecordedError("a sparse layer whose numbers differ between records")

    def gradients(grad_outputs: Tensor) -> Gradients:
        if layout == Layout(0, 1):
            return {name: SparseLinearGrad(positions, numbers, grad_outputs.detach(), weight.shape[1])}
        # Rows of one record may share positions.
        inputs = dense_inputs(positions, numbers.to(grad_outputs.dtype), weight.shape[1])
        return linear_gradients(inputs, grad_outputs, layout, (name, None), batch)

    return recorder.keep(func(*args), gradients, positions, numbers)


def addmm(recorder: GradSampleRecorder, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """output = bias + input weight, for input [n, p], weight [p, o] and bias [o]."""
    if len(args) != 3 or kwargs:
        return general(recorder, func, args, kwargs)
    bias, input, weight = args
    is_layer = recorder.name(weight) is not None and recorder.name(input) is None and bias.dim() == 1
    if not is_layer or recorder.layout_if_any(bias) is not None or recorder.layout(input).dimension != 0:
        return general(recorder, func, args, kwargs)
    names, batch, layout = (
        (recorder.name(weight), recorder.name(bias)),
        recorder.batch,
        recorder.layout(input),
    )

    def gradients(grad_outputs: Tensor) -> Gradients:
        by_name = linear_gradients(input, grad_outputs, layout, names, batch)
        products = by_name[str(names[0])]
        assert isinstance(products, LinearGrad)
        # The weight of `addmm` is the transpose of a linear layer's, so the two sides of its products are swapped.
        return by_name | {str(names[0]): LinearGrad(products.grad_outputs, products.inputs)}

    return recorder.keep(func(*args), gradients, input)


def prelu(recorder: GradSampleRecorder, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """output = input where it is positive, else weight times input; weight [1], or [channels] for dimension 1."""
    input, weight = args if not kwargs else (None, None)
    name = recorder.name(weight)
    if (
        input is None
        or name is None
        or recorder.name(input) is not None
        or recorder.layout(input).dimension != 0
    ):
        return general(recorder, func, args, kwargs)
    layout, batch = recorder.layout(input), recorder.batch

    def gradients(grad_outputs: Tensor) -> Gradients:
        # The derivative by the weight is the input where that is negative, and 0 elsewhere: [batch, channels, ...].
        each = layout.with_channels(wide(grad_outputs) * input.detach().clamp(max=0.0), batch)
        # A weight [1] is summed over channels, too.
        return {name: DenseGrad(each.reshape(batch, weight.numel(), -1).sum(dim=2))}

    return recorder.keep(func(input, weight), gradients, input)


def linear_gradients(
    inputs: Tensor, grad_outputs: Tensor, layout: Layout, names: tuple[str | None, str | None], batch: int
) -> Gradients:
    """The gradients of a weight and a bias, by name; a name is None if it is not trained or absent."""
    weight, bias = names
    # [batch, length, p] and [batch, length, o]
    seen, back = (as_sequence(layout.by_record(part, batch)) for part in (inputs, grad_outputs))
    products, by_name = LinearGrad(seen, back), Gradients()
    if weight is not None:
        by_name[weight] = products
    if bias is not None:
        by_name[bias] = BiasGrad(products)
    return by_name


def as_sequence(values: Tensor) -> Tensor:
    """[batch, ..., width] -> [batch, length, width]; the length is 1 without a sequence."""
    return values.unsqueeze(1) if values.dim() == 2 else values.flatten(start_dim=1, end_dim=-2)


def _arguments(
    input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    return input, weight, bias


def embedding(recorder: GradSampleRecorder, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """output = weight[input], for input [...] and weight [entries, width]."""
    return _record_embedding(recorder, func, *args, **kwargs)


def _record_embedding(
    recorder: GradSampleRecorder,
    func: Func,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    if max_norm is not None or scale_grad_by_freq:
        raise UnrecordedError("an embedding with max_norm or scale_grad_by_freq")
    layout, name = recorder.layout(input), recorder.name(weight)
    if name is None:
        return func(input, weight, padding_idx)
    output, entries = func(input, weight, padding_idx), weight.shape[0]
    padding = None if padding_idx is None else padding_idx % entries  # a negative index counts from the end

    def gradients(grad_outputs: Tensor) -> Gradients:
        return {name: _lookups(layout, recorder.batch, input, grad_outputs, padding, entries)}

    return recorder.keep(output, gradients, input)


def _lookups(
    layout: Layout, batch: int, indices: Tensor, grad_outputs: Tensor, padding: int | None, entries: int
) -> EmbeddingGrad:
    """The lookups of each record; lookups of the padding entry have no gradient."""
    by_record = layout.by_record(indices, batch).reshape(batch, -1).long()  # [batch, lookups]
    back = as_sequence(layout.by_record(grad_outputs, batch))  # [batch, lookups, width]
    if padding is not None:
        back = back * (by_record != padding).to(back.dtype)[:, :, None]
    return EmbeddingGrad(by_record, back, entries)


def embedding_bag(recorder: GradSampleRecorder, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """The sum, mean or maximum of each bag's entries of a table.

    For input [bags, length], or [entries] with offsets [bags], or [bags + 1] if these include the last.
    """
    call = _arguments_by_name(func, args, kwargs)
    input, weighting = call["input"], call.get("per_sample_weights")
    layout = recorder.layout_if_any(input)
    is_other = call.get("max_norm") is not None or call.get("scale_grad_by_freq")
    is_by_record = layout is not None and layout.dimension == 0 and not layout.interleaved
    if is_other or not is_by_record or recorder.name(weighting) is not None:
        return general(recorder, func, args, kwargs)
    name, batch = str(recorder.name(call["weight"])), recorder.batch
    if call.get("mode") == "max":
        output, gradient = _largest_of_bags(call, batch)
    else:
        output, gradient = func(*args, **kwargs), lambda grad_outputs: _bags(call, grad_outputs, batch)
    weights_read = () if weighting is None else (weighting,)
    return recorder.keep(
        output, lambda grad_outputs: {name: gradient(grad_outputs.detach())}, input, *weights_read
    )


def _largest_of_bags(call: Kwargs, batch: int) -> tuple[Tensor, Callable[[Tensor], PerExample]]:
    """The largest numbers of each bag, and a function from their gradients to the table's."""
    input, (count, width) = call["input"], call["weight"].shape
    is_matrix, includes_last = input.dim() == 2, call.get("include_last_offset", False)
    offsets: Tensor = (
        torch.arange(0, input.numel(), input.shape[1], device=input.device) if is_matrix else call["offsets"]
    )
    settings = (False, _BY_MAXIMUM, False, None, includes_last and not is_matrix, call.get("padding_idx"))
    # chosen: [bags, width], rows of the table
    output, _, sizes, chosen = torch.embedding_bag(call["weight"], input.reshape(-1), offsets, *settings)
    sizes = sizes[: len(output)]

    def gradient(grad_outputs: Tensor) -> PerExample:
        # Every column chooses an entry: lookups in a table of single numbers. Empty bags learn nothing.
        # [bags, width], in the flat table
        numbers = chosen * width + torch.arange(width, device=chosen.device)
        back = torch.where(sizes[:, None] > 0, grad_outputs, 0.0)
        return EmbeddingGrad(numbers.view(batch, -1), back.reshape(batch, -1, 1), count * width)

    return output, gradient


_BY_MAXIMUM = 2
"""The mode of `torch.embedding_bag` that takes maxima."""


_SHORT_TABLE, _FOR_EACH = 256, 8
"""Entries of a table, and those for each entry of a bag, up to which it costs more to find out which ones are used."""


def _bags(call: Kwargs, grad_outputs: Tensor, batch: int) -> PerExample:
    """The gradients of a table of whose entries each bag has the sum or the mean."""
    input, (count, width), weighting = call["input"], call["weight"].shape, call.get("per_sample_weights")
    padding, is_mean = call.get("padding_idx"), call.get("mode", "mean") == "mean"
    # Bags by offsets lie next to each other, so where each record has one, it holds all entries of the record.
    is_single = len(grad_outputs) == batch
    indices, bag = input.reshape(batch, -1) if is_single else input, None
    if indices.dim() == 1:
        order = torch.arange(len(input), device=input.device)
        # [entries]: that of the last offset not after the entry
        bag = torch.searchsorted(call["offsets"], order, right=True) - 1
    # share: how much of an entry its bag takes, shaped as the indices. bag: of an entry.
    ones = grad_outputs.new_ones(1)
    share = ones.expand(indices.shape) if weighting is None else weighting.detach().view(indices.shape)
    if padding is not None:
        share = share * (indices != padding % count)
    if is_mean:
        # How many entries of a bag count for its mean; an empty bag is divided by 1.
        sizes = share.sum(dim=1, keepdim=True) if bag is None else _by_bag(bag, share, len(grad_outputs))[bag]
        share = share / sizes.clamp(min=1.0)
    # A product with all entries takes less time if these are few; bags of several a record are then compared by memory.
    is_short = (
        count <= _SHORT_TABLE + _FOR_EACH * indices.shape[1]
        if is_single
        else len(grad_outputs) * count <= 2 * input.numel() * width
    )
    if is_short:
        if bag is None:
            # [bags, count]
            shares = share.new_zeros(len(grad_outputs), count).scatter_add_(1, indices.long(), share)
        else:
            shares = _by_bag(bag * count + indices, share, len(grad_outputs) * count)
        # Several bags of a record are the sequence of its products.
        return LinearGrad(grad_outputs.view(batch, -1, width), shares.view(batch, -1, count))
    if is_single:
        return BagGrad(indices.long(), share, grad_outputs, count)
    # [bags, length, width], or [entries, width]
    back = (grad_outputs[:, None] if bag is None else grad_outputs[bag]) * share[..., None]
    return EmbeddingGrad(indices.reshape(batch, -1).long(), back.view(batch, -1, width), count)


def _by_bag(bags: Tensor, shares: Tensor, count: int) -> Tensor:
    """Sums of shares by bag, [count]."""
    return shares.new_zeros(count).index_add_(0, bags, shares)


def entries(recorder: GradSampleRecorder, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """weight[index] and index_select(weight, 0, index): lookups in a table, like an embedding's."""
    if func is Tensor.__getitem__:
        weight, index = args
    elif kwargs or len(args) != 3 or args[1] != 0:
        return general(recorder, func, args, kwargs)
    else:
        weight, _, index = args
    is_lookup = isinstance(index, Tensor) and index.dtype in (torch.int64, torch.int32) and index.dim() > 0
    layout = recorder.layout_if_any(index) if is_lookup else None
    if layout is None or recorder.name(weight) is None or recorder.output_layout != layout:
        return general(recorder, func, args, kwargs)
    name, batch, count = str(recorder.name(weight)), recorder.batch, len(weight)

    def gradients(grad_outputs: Tensor) -> Gradients:
        # [batch, lookups]; negative indices count from the end
        by_record = layout.by_record(index, batch).reshape(batch, -1).long() % count
        back = layout.by_record(grad_outputs, batch).reshape(*by_record.shape, -1)
        return {name: EmbeddingGrad(by_record, back, count)}

    return recorder.keep(func(*args), gradients, index)


def tile(recorder: GradSampleRecorder, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """A parameter that is repeated for every record, and possibly along its own dimensions."""
    parameter, *times = args
    times = list(times[0] if len(times) == 1 and isinstance(times[0], Sequence) else times)
    out, batch, name = recorder.output_layout, recorder.batch, str(recorder.name(parameter))
    # Dimensions that repeating adds come first.
    shape = (1,) * (len(times) - parameter.dim()) + tuple(parameter.shape)
    times = [1] * (len(shape) - len(times)) + times
    if kwargs or out.interleaved or out.rows_per_record % shape[out.dimension]:
        return general(recorder, func, args, kwargs)
    times[out.dimension] = out.rows_per_record // shape[out.dimension]  # how often for one record
    # Split every dimension into repetitions and the parameter's own, with the batch first as in `by_record`.
    order = [out.dimension, *(i for i in range(len(shape)) if i != out.dimension)]
    apart = [size for i in order for size in (times[i], shape[i])]

    def gradients(grad_outputs: Tensor) -> Gradients:
        # [batch, times, size, times, size, ...], to be summed over all times.
        each = out.by_record(grad_outputs, batch).reshape(batch, *apart)
        each = each.sum(dim=[1 + 2 * dimension for dimension in range(len(shape))])
        # The dimension that came second returns to where it was.
        return {name: DenseGrad(each.movedim(1, 1 + out.dimension).reshape(batch, -1))}

    return recorder.keep(func(*args), gradients)


_OVER_LAST = (functional.layer_norm, functional.rms_norm, torch.layer_norm, torch.rms_norm)


def normalisation(recorder: GradSampleRecorder, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Layer and RMS norm (weights over the last dimensions); group, instance and fixed batch norm (over channels)."""
    call = _arguments_by_name(func, args, kwargs)
    input = call["input"]
    layout = recorder.layout(input)
    over_last = func in _OVER_LAST
    if recorder.name(input) is not None or not (over_last or layout.dimension == 0):
        return general(recorder, func, args, kwargs)
    names = recorder.name(call.get("weight")), recorder.name(call.get("bias"))
    # y = w * n(x) + b: the weight's gradient is error times n(x). n(x) is computed again from the recorded input,
    # without weight and bias.
    bare = call | {name: None for name in ("weight", "bias") if name in call}
    kept_dimensions = len(call["normalized_shape"]) if over_last else 0
    by_record = layout.by_record if over_last else layout.with_channels

    def gradients(grad_outputs: Tensor) -> Gradients:
        with torch.no_grad():
            normalised = by_record(func(**bare), recorder.batch)
        return _gradients(normalised, by_record(grad_outputs, recorder.batch), names, kept_dimensions)

    return recorder.keep(func(*args, **kwargs), gradients, input)


def _gradients(
    normalised: Tensor, grad_outputs: Tensor, names: tuple[str | None, str | None], kept_dimensions: int
) -> Gradients:
    weight, bias = names
    by_name: Gradients = {}
    if weight is not None:
        by_name[weight] = DenseGrad(_sum_leading_dimensions(grad_outputs * normalised, kept_dimensions))
    if bias is not None:
        by_name[bias] = DenseGrad(_sum_leading_dimensions(grad_outputs, kept_dimensions))
    return by_name


def _sum_leading_dimensions(values: Tensor, kept_dimensions: int) -> Tensor:
    """Sum to [batch, numel] over all dimensions except the last `kept_dimensions`; for 0, except the channels."""
    if kept_dimensions == 0:
        return values.flatten(start_dim=2).sum(dim=2) if values.dim() > 2 else values
    values = values.flatten(start_dim=values.dim() - kept_dimensions)
    return values.flatten(start_dim=1, end_dim=-2).sum(dim=1) if values.dim() > 2 else values


def _arguments_by_name(func: Func, args: Args, kwargs: Kwargs) -> Kwargs:
    """The arguments by name."""
    return dict(zip(_names(func), args, strict=False)) | kwargs


@cache
def _names(func: Func) -> tuple[str, ...]:
    """The names of a function's arguments, which PyTorch's C++ functions do not have."""
    return _BUILT_IN.get(func) or tuple(inspect.signature(func).parameters)


_MOMENTS = ("input", "weight", "bias", "running_mean", "running_var")
_BUILT_IN: dict[Func, tuple[str, ...]] = {
    torch.layer_norm: ("input", "normalized_shape", "weight", "bias", "eps", "cudnn_enable"),
    torch.rms_norm: ("input", "normalized_shape", "weight", "eps"),
    torch.group_norm: ("input", "num_groups", "weight", "bias", "eps", "cudnn_enabled"),
    torch.batch_norm: (*_MOMENTS, "training", "momentum", "eps", "cudnn_enabled"),
    torch.instance_norm: (*_MOMENTS, "use_input_stats", "momentum", "eps", "cudnn_enabled"),
}


_ATTENTION = inspect.signature(functional.multi_head_attention_forward).parameters
_DEFAULTS = {name: argument.default for name, argument in _ATTENTION.items()}
_UNSUPPORTED = ("static_k", "static_v")


def multi_head_attention(recorder: GradSampleRecorder, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """torch.nn.functional.multi_head_attention_forward, for query, key and value [length, batch, width].

    A record may have several consecutive rows of the batch, such as its patches or channels.
    """
    call = _DEFAULTS | _arguments_by_name(func, args, kwargs)
    used = [name for name in _UNSUPPORTED if call[name] is not None and call[name] is not False]
    if used or call["query"].dim() != 3:
        raise UnrecordedError(f"multi-head attention with {', '.join(used) or 'a single record'}")
    layout, *others = (recorder.layout_if_any(call[part]) for part in ("query", "key", "value"))
    if layout is None or layout.dimension != 1 or any(other != layout for other in others):
        raise UnrecordedError("multi-head attention whose records are not in the second dimension")
    heads = call["num_heads"]
    # Only the linear layers before and after have parameters; the attention between them is separate for each record.
    # [targets, batch, width], and [sources, batch, width] twice
    target, *sources = _project(recorder, call, layout)
    for side, entry in enumerate((call["bias_k"], call["bias_v"])):
        if entry is not None:
            # `bias_k` and `bias_v` are one more source at the end, the same for all records.
            sources[side] = torch.cat([sources[side], _expand_rows(recorder, entry, target.shape[1], layout)])
    if call["add_zero_attn"]:
        # One more source of zeros: `pad` takes the last dimension first, so the last pair is that of the sources.
        sources = [functional.pad(part, (0, 0, 0, 0, 0, 1)) for part in sources]
    # [batch, heads, length, width / heads]
    query, key, value = (_by_head(part, heads) for part in (target, *sources))
    mask = _mask(call, query)
    if mask is not None:  # entries of the layer's own are never masked
        mask = functional.pad(mask, (0, key.shape[2] - mask.shape[-1]))
    mixed, weights = _attend(query, key, value, mask, call)
    # [batch, heads, targets, width / heads] -> [targets, batch, width]
    together = mixed.permute(2, 0, 1, 3).flatten(start_dim=2)
    weight, bias = call["out_proj_weight"], call["out_proj_bias"]
    rows = slice(0, len(weight))
    return _record_linear(recorder, together, layout, weight, rows, bias, rows), weights


def scaled_dot_product_attention(recorder: GradSampleRecorder, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """torch.nn.functional.scaled_dot_product_attention with a trained mask, such as a relative position bias."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    call = dict(zip(names, args, strict=False)) | kwargs
    mask = call.get("attn_mask")
    parts = [call[part] for part in ("query", "key", "value")]
    if mask is None or any(recorder.name(part) is not None for part in parts):
        return general(recorder, func, args, kwargs)
    layouts = [recorder.layout_if_any(part) for part in parts]
    rows_per_record = layouts[0].rows_per_record if layouts[0] is not None else 0
    if (
        any(layout != Layout(0, rows_per_record) for layout in layouts)
        or call.get("enable_gqa")
        or call.get("is_causal")
    ):
        return general(recorder, func, args, kwargs)
    query, key, value = parts
    scale = call.get("scale")
    if scale is None:
        scale = 1.0 / math.sqrt(query.shape[-1])
    scores = (query @ key.transpose(-2, -1)) * scale  # [batch, heads, targets, sources]
    layout, shape, name, batch = (
        Layout(0, rows_per_record),
        mask.shape,
        str(recorder.name(mask)),
        recorder.batch,
    )

    def gradients(grad_outputs: Tensor) -> Gradients:
        return {name: DenseGrad(summed_to(grad_outputs, shape, layout, batch))}

    scores = recorder.keep(scores + mask, gradients)
    weights = functional.dropout(torch.softmax(scores, dim=-1), call.get("dropout_p", 0.0))
    return weights @ value


def _project(recorder: GradSampleRecorder, call: Kwargs, layout: Layout) -> list[Tensor]:
    """Query, key and value after their linear layers, each [length, batch, width]."""
    parts = [call["query"], call["key"], call["value"]]
    bias, packed = call["in_proj_bias"], call["in_proj_weight"]
    width = call["embed_dim_to_check"]
    # Rows of the packed weight for query, key and value.
    thirds = [slice(i * width, (i + 1) * width) for i in range(3)]
    whole = slice(0, 3 * width)
    if call["use_separate_proj_weight"]:
        weights = [call[f"{part}_proj_weight"] for part in "qkv"]
        return [
            _record_linear(recorder, x, layout, w, slice(0, width), bias, t)
            for x, w, t in zip(parts, weights, thirds, strict=True)
        ]
    if parts[0] is parts[1] and parts[1] is parts[2]:  # self-attention: one product with the packed weight
        return list(_record_linear(recorder, parts[0], layout, packed, whole, bias, whole).chunk(3, dim=-1))
    return [
        _record_linear(recorder, x, layout, packed, third, bias, third)
        for x, third in zip(parts, thirds, strict=True)
    ]


def _record_linear(
    recorder: GradSampleRecorder,
    inputs: Tensor,
    layout: Layout,
    weight: Tensor,
    rows: slice,
    bias: Tensor | None,
    entries: slice,
) -> Tensor:
    """Apply and record a linear layer that uses some rows of a weight and some entries of a bias."""
    names = recorder.name(weight), recorder.name(bias)
    output = functional.linear(inputs, weight[rows], None if bias is None else bias[entries])
    # Shapes are read here: later, what a parameter is asked is handed to `__torch_function__`, which takes longer.
    parts = {names[0]: (weight.shape, rows), names[1]: (() if bias is None else bias.shape, entries)}

    def gradients(grad_outputs: Tensor) -> Gradients:
        by_name = linear_gradients(inputs, grad_outputs, layout, names, recorder.batch)
        return {name: _pad_to_parameter(gradient, *parts[name]) for name, gradient in by_name.items()}

    return output if names == (None, None) else recorder.keep(output, gradients, inputs)


def _expand_rows(recorder: GradSampleRecorder, parameter: Tensor, rows: int, layout: Layout) -> Tensor:
    """A parameter [1, 1, width], recorded, for all rows of the batch, [1, rows, width]."""
    name, shape = recorder.name(parameter), parameter.shape
    output = parameter.expand(1, rows, -1)

    def gradients(grad_outputs: Tensor) -> Gradients:
        return {str(name): DenseGrad(summed_to(grad_outputs, shape, layout, recorder.batch))}

    return output if name is None else recorder.keep(output, gradients)


def _pad_to_parameter(gradient: PerExample, shape: Sequence[int], rows: slice) -> PerExample:
    """Gradients of some rows of a parameter of a given shape, as gradients of the whole parameter."""
    if rows.stop - rows.start == shape[0]:
        return gradient
    each = math.prod(shape[1:])  # row after row
    return SlicedGrad({(rows.start * each, rows.stop * each): gradient}, shape[0] * each)


def _by_head(values: Tensor, heads: int) -> Tensor:
    """[length, batch, width] -> [batch, heads, length, width / heads]."""
    return torch.unflatten(values, 2, (heads, -1)).permute(1, 2, 0, 3)


def _mask(call: Kwargs, query: Tensor) -> Tensor | None:
    """Both masks combined into one that is added to the scores; it expands to [batch, heads, targets, sources]."""
    added = None
    if call["attn_mask"] is not None:
        added = _additive_mask(call["attn_mask"], query)
        # [batch * heads, targets, sources], batch first
        added = torch.unflatten(added, 0, query.shape[:2]) if added.dim() == 3 else added
    if call["key_padding_mask"] is not None:
        padding = _additive_mask(call["key_padding_mask"], query)[:, None, None, :]  # [batch, 1, 1, sources]
        added = padding if added is None else added + padding
    return added


def _additive_mask(mask: Tensor, like: Tensor) -> Tensor:
    """Convert a boolean mask, whose true entries are excluded, to numbers to add; other masks are unchanged."""
    if mask.dtype != torch.bool:
        return mask.to(like.dtype)
    # Softmax gives exp(-inf) = 0.
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill_(mask, -math.inf)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, call: Kwargs
) -> tuple[Tensor, Tensor | None]:
    """The attention output, [batch, heads, targets, width / heads], and the attention weights if requested."""
    dropout = call["dropout_p"] if call["training"] else 0.0
    if not call["need_weights"]:
        return functional.scaled_dot_product_attention(query, key, value, mask, dropout), None
    scores = query @ key.transpose(2, 3) / math.sqrt(query.shape[3])
    weights = torch.softmax(scores if mask is None else scores + mask, dim=-1)
    weights = functional.dropout(weights, dropout) if dropout else weights
    # Weights of heads are averaged, or [batch, heads, ...]
    return weights @ value, weights.mean(dim=1) if call["average_attn_weights"] else weights

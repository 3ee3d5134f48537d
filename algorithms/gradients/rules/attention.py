"""Multi-head attention as PyTorch's own layer computes it: linear layers before and after the attention itself."""

import inspect
import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from algorithms.gradients.grad_sample_recorder import Args, Func, Gradients, GradSampleRecorder, Kwargs
from algorithms.gradients.grads import DenseGrad, PerExample
from algorithms.gradients.padding import Layout, UnrecordedError
from algorithms.gradients.rules.elementwise import summed_to
from algorithms.gradients.rules.general import general
from algorithms.gradients.rules.layers import linear_gradients

_SIGNATURE = inspect.signature(functional.multi_head_attention_forward)
_UNSUPPORTED = ("bias_k", "bias_v", "add_zero_attn", "static_k", "static_v")


def multi_head_attention(tape: GradSampleRecorder, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """torch.nn.functional.multi_head_attention_forward, for query, key and value [length, batch, width].

    A record may have several consecutive rows of the batch, such as its patches or channels.
    """
    bound = _SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    call = bound.arguments
    used = [name for name in _UNSUPPORTED if call[name] is not None and call[name] is not False]
    if used or call["query"].dim() != 3:
        raise UnrecordedError(f"multi-head attention with {', '.join(used) or 'a single record'}")
    layout, *others = (tape.layout_if_any(call[part]) for part in ("query", "key", "value"))
    if layout is None or layout.dimension != 1 or any(other != layout for other in others):
        raise UnrecordedError("multi-head attention whose records are not in the second dimension")
    heads = call["num_heads"]
    # Only the linear layers before and after have parameters; the attention between them is separate for each record.
    query, key, value = (_by_head(part, heads) for part in _projected(tape, call, layout))
    mask = _mask(call, query)
    mixed, weights = _attend(query, key, value, mask, call)
    together = mixed.permute(2, 0, 1, 3).flatten(start_dim=2)
    weight, bias = call["out_proj_weight"], call["out_proj_bias"]
    rows = slice(0, len(weight))
    return _kept(tape, together, layout, weight, rows, bias, rows), weights


def scaled_dot_product_attention(tape: GradSampleRecorder, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """torch.nn.functional.scaled_dot_product_attention with a trained mask, such as a relative position bias."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    call = dict(zip(names, args, strict=False)) | kwargs
    mask = call.get("attn_mask")
    parts = [call[part] for part in ("query", "key", "value")]
    if mask is None or any(tape.name(part) is not None for part in parts):
        return general(tape, func, args, kwargs)
    layouts = [tape.layout_if_any(part) for part in parts]
    folded = layouts[0].folded if layouts[0] is not None else 0
    if (
        any(layout != Layout(0, folded) for layout in layouts)
        or call.get("enable_gqa")
        or call.get("is_causal")
    ):
        return general(tape, func, args, kwargs)
    query, key, value = parts
    scale = call.get("scale") or 1.0 / math.sqrt(query.shape[-1])
    scores = (query @ key.transpose(-2, -1)) * scale
    layout, shape, name, batch = Layout(0, folded), mask.shape, str(tape.name(mask)), tape.batch

    def gradients(errors: Tensor) -> Gradients:
        return {name: DenseGrad(summed_to(errors, shape, layout, batch))}

    scores = tape.keep(scores + mask, gradients)
    weights = functional.dropout(torch.softmax(scores, dim=-1), call.get("dropout_p", 0.0))
    return weights @ value


def _projected(tape: GradSampleRecorder, call: dict[str, Any], layout: Layout) -> list[Tensor]:
    """Query, key and value after their linear layers, each [length, batch, width]."""
    parts = [call["query"], call["key"], call["value"]]
    bias, packed = call["in_proj_bias"], call["in_proj_weight"]
    width = call["embed_dim_to_check"]
    thirds = [slice(i * width, (i + 1) * width) for i in range(3)]
    whole = slice(0, 3 * width)
    if call["use_separate_proj_weight"]:
        weights = [call[f"{part}_proj_weight"] for part in "qkv"]
        return [
            _kept(tape, x, layout, w, slice(0, width), bias, t)
            for x, w, t in zip(parts, weights, thirds, strict=True)
        ]
    if parts[0] is parts[1] and parts[1] is parts[2]:  # self-attention: one product with the packed weight
        return list(_kept(tape, parts[0], layout, packed, whole, bias, whole).chunk(3, dim=-1))
    return [
        _kept(tape, x, layout, packed, third, bias, third) for x, third in zip(parts, thirds, strict=True)
    ]


def _kept(
    tape: GradSampleRecorder,
    inputs: Tensor,
    layout: Layout,
    weight: Tensor,
    rows: slice,
    bias: Tensor | None,
    entries: slice,
) -> Tensor:
    """Apply and record a linear layer that uses some rows of a weight and some entries of a bias."""
    names = tape.name(weight), tape.name(bias)
    output = functional.linear(inputs, weight[rows], None if bias is None else bias[entries])

    def gradients(errors: Tensor) -> Gradients:
        found = linear_gradients(inputs, errors, layout, names, tape.batch)
        wholes = {names[0]: (weight, rows), names[1]: (bias, entries)}
        return {name: _placed(gradient, *wholes[name]) for name, gradient in found.items()}

    return output if names == (None, None) else tape.keep(output, gradients, inputs)


def _placed(gradient: PerExample, parameter: Tensor | None, part: slice) -> PerExample:
    """Gradients of some rows of a parameter, as gradients of the whole parameter."""
    if parameter is None or part.stop - part.start == len(parameter):
        return gradient
    each = parameter[0].numel()
    # In row-major order, the rows before and after become zeros at the beginning and the end.
    return DenseGrad(functional.pad(gradient.rows, (part.start * each, (len(parameter) - part.stop) * each)))


def _by_head(values: Tensor, heads: int) -> Tensor:
    """[length, batch, width] -> [batch, heads, length, width / heads]."""
    return torch.unflatten(values, 2, (heads, -1)).permute(1, 2, 0, 3)


def _mask(call: dict[str, Any], query: Tensor) -> Tensor | None:
    """Both masks combined into one that is added to the scores; it expands to [batch, heads, targets, sources]."""
    added = None
    if call["attn_mask"] is not None:
        added = _added(call["attn_mask"], query)
        added = torch.unflatten(added, 0, query.shape[:2]) if added.dim() == 3 else added
    if call["key_padding_mask"] is not None:
        padding = _added(call["key_padding_mask"], query)[:, None, None, :]
        added = padding if added is None else added + padding
    return added


def _added(mask: Tensor, like: Tensor) -> Tensor:
    """Convert a boolean mask, whose true entries are excluded, to numbers to add; other masks are unchanged."""
    if mask.dtype != torch.bool:
        return mask.to(like.dtype)
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill_(mask, -math.inf)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, call: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """The attention output, [batch, heads, targets, width / heads], and the attention weights if requested."""
    dropout = call["dropout_p"] if call["training"] else 0.0
    if not call["need_weights"]:
        return functional.scaled_dot_product_attention(query, key, value, mask, dropout), None
    scores = query @ key.transpose(2, 3) / math.sqrt(query.shape[3])
    weights = torch.softmax(scores if mask is None else scores + mask, dim=-1)
    weights = functional.dropout(weights, dropout) if dropout else weights
    return weights @ value, weights.mean(dim=1) if call["average_attn_weights"] else weights

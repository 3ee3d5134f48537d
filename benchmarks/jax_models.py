"""The workloads' modules as JAX functions of the same parameters, translated layer by layer.

A translated module takes the parameters by PyTorch's names, a prefix of those names, and inputs with a batch axis.
Images stay in PyTorch's order (channels first), so that weights need no reordering.
"""

from collections.abc import Mapping
from functools import singledispatch
from typing import cast

import jax
import jax.numpy as jnp
from jax import Array, lax
from torch import nn

from benchmarks.transformer import HEADS, SCALING, WIDTH, Adapted, AdaptedTransformer, Block
from benchmarks.workloads import LastStates

Parameters = Mapping[str, Array]


@singledispatch
def apply(module: nn.Module, parameters: Parameters, prefix: str, inputs: Array) -> Array:
    """The outputs of a module; raises NotImplementedError for a layer that no workload has."""
    raise NotImplementedError(f"{type(module).__name__} has no translation to JAX.")


@apply.register
def _(module: nn.Sequential, parameters: Parameters, prefix: str, inputs: Array) -> Array:
    for name, layer in module.named_children():
        inputs = apply(layer, parameters, f"{prefix}{name}.", inputs)
    return inputs


@apply.register
def _(module: nn.Flatten, parameters: Parameters, prefix: str, inputs: Array) -> Array:
    return inputs.reshape(len(inputs), -1)


@apply.register
def _(module: nn.Tanh, parameters: Parameters, prefix: str, inputs: Array) -> Array:
    return jnp.tanh(inputs)


@apply.register
def _(module: nn.ReLU, parameters: Parameters, prefix: str, inputs: Array) -> Array:
    return jax.nn.relu(inputs)


@apply.register
def _(module: nn.Linear, parameters: Parameters, prefix: str, inputs: Array) -> Array:
    outputs = inputs @ parameters[f"{prefix}weight"].T
    return outputs if module.bias is None else outputs + parameters[f"{prefix}bias"]


@apply.register
def _(module: nn.Embedding, parameters: Parameters, prefix: str, inputs: Array) -> Array:
    return parameters[f"{prefix}weight"][inputs]


@apply.register
def _(module: nn.Conv2d, parameters: Parameters, prefix: str, inputs: Array) -> Array:
    height, width = cast(tuple[int, int], module.padding)
    outputs = lax.conv_general_dilated(
        inputs,
        parameters[f"{prefix}weight"],
        window_strides=module.stride,
        padding=((height, height), (width, width)),
        dimension_numbers=("NCHW", "OIHW", "NCHW"),
    )
    return outputs + parameters[f"{prefix}bias"][:, None, None]


@apply.register
def _(module: nn.MaxPool2d, parameters: Parameters, prefix: str, inputs: Array) -> Array:
    size, stride = cast(int, module.kernel_size), cast(int, module.stride)
    outputs: Array = lax.reduce_window(
        inputs, -jnp.inf, lax.max, (1, 1, size, size), (1, 1, stride, stride), "VALID"
    )
    return outputs


@apply.register
def _(module: nn.GroupNorm, parameters: Parameters, prefix: str, inputs: Array) -> Array:
    groups = inputs.reshape(len(inputs), module.num_groups, -1)
    return _standardised(groups, module.eps).reshape(inputs.shape)


@apply.register
def _(module: nn.LayerNorm, parameters: Parameters, prefix: str, inputs: Array) -> Array:
    return _standardised(inputs, module.eps) * parameters[f"{prefix}weight"] + parameters[f"{prefix}bias"]


@apply.register
def _(module: LastStates, parameters: Parameters, prefix: str, inputs: Array) -> Array:
    sequence = inputs.swapaxes(0, 1)
    forward = _last_state(parameters, f"{prefix}lstm.", "_l0", sequence)
    backward = _last_state(parameters, f"{prefix}lstm.", "_l0_reverse", sequence[::-1])
    return jnp.concatenate([forward, backward], axis=1)


@apply.register
def _(module: Adapted, parameters: Parameters, prefix: str, inputs: Array) -> Array:
    thin = apply(
        module.up, parameters, f"{prefix}up.", apply(module.down, parameters, f"{prefix}down.", inputs)
    )
    return apply(module.base, parameters, f"{prefix}base.", inputs) + SCALING * thin


@apply.register
def _(module: Block, parameters: Parameters, prefix: str, inputs: Array) -> Array:
    def layer(name: str, values: Array) -> Array:
        return apply(getattr(module, name), parameters, f"{prefix}{name}.", values)

    normalised = layer("before_attention", inputs)
    shape = (*inputs.shape[:2], HEADS, WIDTH // HEADS)
    query, key, value = (layer(name, normalised).reshape(shape) for name in ("query", "key", "value"))
    mixed = jax.nn.dot_product_attention(query, key, value)
    attended = inputs + layer("out", mixed.reshape(inputs.shape))
    hidden = jax.nn.gelu(layer("wide", layer("before_feed_forward", attended)), approximate=False)
    return attended + layer("narrow", hidden)


@apply.register
def _(module: AdaptedTransformer, parameters: Parameters, prefix: str, inputs: Array) -> Array:
    blocks = apply(module.blocks, parameters, f"{prefix}blocks.", inputs)
    return apply(module.head, parameters, f"{prefix}head.", blocks.mean(axis=1))


def _standardised(values: Array, epsilon: float) -> Array:
    mean = values.mean(axis=-1, keepdims=True)
    return (values - mean) * lax.rsqrt(values.var(axis=-1, keepdims=True) + epsilon)


def _last_state(parameters: Parameters, prefix: str, suffix: str, sequence: Array) -> Array:
    """An LSTM's last hidden state, sequence [length, batch, p] -> [batch, hidden]; gates in PyTorch's order."""
    recurrent = parameters[f"{prefix}weight_hh{suffix}"]
    bias = parameters[f"{prefix}bias_ih{suffix}"] + parameters[f"{prefix}bias_hh{suffix}"]
    gates = sequence @ parameters[f"{prefix}weight_ih{suffix}"].T + bias

    def cell(states: tuple[Array, Array], step: Array) -> tuple[tuple[Array, Array], None]:
        hidden, memory = states
        admit, forget, update, emit = jnp.split(step + hidden @ recurrent.T, 4, axis=-1)
        memory = jax.nn.sigmoid(forget) * memory + jax.nn.sigmoid(admit) * jnp.tanh(update)
        return (jax.nn.sigmoid(emit) * jnp.tanh(memory), memory), None

    zeros = jnp.zeros((sequence.shape[1], recurrent.shape[1]), sequence.dtype)
    (hidden, _), _ = lax.scan(cell, (zeros, zeros), gates)
    return hidden

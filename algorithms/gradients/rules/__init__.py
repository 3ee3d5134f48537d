"""The rules for per-example gradients, by torch function."""

import torch
from torch import Tensor
from torch.nn import functional

from algorithms.gradients.grad_sample_recorder import Func, Rule
from algorithms.gradients.rules.convolution import convolution, transposed_convolution
from algorithms.gradients.rules.general import general, pull_back, shared_operation
from algorithms.gradients.rules.layers import (
    addmm,
    embedding,
    embedding_bag,
    entries,
    linear,
    multi_head_attention,
    normalisation,
    prelu,
    scaled_dot_product_attention,
    sparse_linear,
    tile,
)
from algorithms.gradients.rules.products import bilinear, product, product_and_sum
from algorithms.gradients.rules.recurrent import (
    gru,
    lstm,
    padded_layers,
    padded_recurrence,
    recurrent_cell,
    rnn,
)
from algorithms.gradients.sparse_linear import weighted_sums

__all__ = ["RULES", "general", "pull_back", "shared_operation"]


RULES: dict[Func, Rule] = {
    functional.linear: linear,
    weighted_sums: sparse_linear,
    torch.conv1d: convolution,
    torch.conv2d: convolution,
    torch.conv3d: convolution,
    torch.conv_transpose1d: transposed_convolution,
    torch.conv_transpose2d: transposed_convolution,
    torch.conv_transpose3d: transposed_convolution,
    functional.embedding: embedding,
    functional.embedding_bag: embedding_bag,
    Tensor.__getitem__: entries,
    torch.index_select: entries,
    Tensor.index_select: entries,
    Tensor.repeat: tile,
    torch.tile: tile,
    Tensor.tile: tile,
    functional.layer_norm: normalisation,
    functional.rms_norm: normalisation,
    functional.group_norm: normalisation,
    functional.instance_norm: normalisation,
    functional.batch_norm: normalisation,  # with fixed statistics; otherwise it mixes records and is refused
    torch.layer_norm: normalisation,
    torch.rms_norm: normalisation,
    torch.group_norm: normalisation,
    torch.instance_norm: normalisation,
    torch.batch_norm: normalisation,
    functional.multi_head_attention_forward: multi_head_attention,
    functional.scaled_dot_product_attention: scaled_dot_product_attention,
    torch.matmul: product,
    torch.mm: product,
    torch.bmm: product,
    torch.mv: product,
    torch.einsum: product,
    torch.tensordot: product,
    Tensor.matmul: product,
    Tensor.mm: product,
    Tensor.bmm: product,
    Tensor.mv: product,
    Tensor.__matmul__: product,
    Tensor.__rmatmul__: product,
    torch.baddbmm: product_and_sum,
    Tensor.baddbmm: product_and_sum,
    torch.bilinear: bilinear,
    torch.addmm: addmm,
    torch.prelu: prelu,
    torch.lstm: lstm,
    torch.gru: gru,
    torch.rnn_tanh: rnn,
    torch.rnn_relu: rnn,
    padded_layers: padded_recurrence,
    torch.lstm_cell: recurrent_cell,
    torch.gru_cell: recurrent_cell,
    torch.rnn_tanh_cell: recurrent_cell,
    torch.rnn_relu_cell: recurrent_cell,
}

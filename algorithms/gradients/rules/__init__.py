"""What each operation's gradients are made of.

The rules by torch function.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from algorithms.gradients.grad_sample_recorder import Rule
from algorithms.gradients.rules.attention import multi_head_attention
from algorithms.gradients.rules.convolution import convolution
from algorithms.gradients.rules.general import general
from algorithms.gradients.rules.layers import embedding, linear, normalisation
from algorithms.gradients.rules.recurrent import gru, lstm

__all__ = ["RULES", "general"]


RULES: dict[Callable[..., Any], Rule] = {
    functional.linear: linear,
    torch.conv1d: convolution,
    torch.conv2d: convolution,
    functional.embedding: embedding,
    functional.layer_norm: normalisation,
    functional.rms_norm: normalisation,
    functional.group_norm: normalisation,
    functional.instance_norm: normalisation,
    functional.batch_norm: normalisation,  # with fixed statistics; others mix records and are refused
    functional.multi_head_attention_forward: multi_head_attention,
    torch.lstm: lstm,
    torch.gru: gru,
}

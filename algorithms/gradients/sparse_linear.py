"""A linear layer on vectors that are zero but for a few positions, computed from these alone."""

from torch import Tensor
from torch.nn import functional

from algorithms.gradients.grad_sample_recorder import RecordedTensor, active_recorder


def sparse_linear(positions: Tensor, numbers: Tensor, weight: Tensor) -> Tensor:
    """input weight^T for inputs with `numbers` [k] at positions [batch, k], all different, and zeros elsewhere.

    weight: [outputs, width]. Returns [batch, outputs].

    Example:
        >>> import torch
        >>> weight = torch.tensor([[1.0, 10.0, 100.0]])
        >>> sparse_linear(torch.tensor([[0, 2], [1, 2]]), torch.tensor([0.5, 2.0]), weight)
        tensor([[200.5000],
                [205.0000]])
    """
    recorder = active_recorder()
    if recorder is not None and isinstance(weight, RecordedTensor):
        outputs: Tensor = recorder.report(weighted_sums, (positions, numbers, weight), {})
        return outputs
    return weighted_sums(positions, numbers, weight)


def weighted_sums(positions: Tensor, numbers: Tensor, weight: Tensor) -> Tensor:
    """What `sparse_linear` returns, as the recorder sees it."""
    each = numbers.to(weight.dtype).expand(positions.shape).contiguous()
    table = weight.t().contiguous()  # [width, outputs], of which a place is a row
    return functional.embedding_bag(positions, table, mode="sum", per_sample_weights=each)

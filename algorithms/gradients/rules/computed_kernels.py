"""Operations by which kernels are computed from parameters, as of state spaces: gradients stay factored until a sum.

A kernel k_hl = sum_n C_hn exp(l A_hn) is a function of few parameters by way of many values, one for each h, n and l.
A record's gradient of these is a product: its gradient of the kernel, which does not depend on n, times numbers that
all records share. So it is kept as two factors, the shared one takes up the slopes of maps by entries, and the sum over
l, which leads back to A, is a product of matrices. No gradient of the many values is formed for each record.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from algorithms.gradients.factored_gradients import FactoredGrad
from algorithms.gradients.grad_sample_recorder import Args, Closed, Gradients, Kwargs
from algorithms.gradients.model_gradients import combine_by_name
from algorithms.gradients.parameter_gradients import DenseGrad, PerExample
from algorithms.gradients.rules.einsum_terms import RECORD, einsum_terms

_PRODUCTS = frozenset(("mul", "__mul__", "multiply"))
_TRANSFORMS = frozenset(("fft_fft", "fft_ifft", "fft_rfft", "fft_irfft"))


_Pull = Callable[[PerExample], Sequence[PerExample | None]]


def kernel_form(
    name: str, sources: Mapping[int, str], output: Tensor, args: Args, kwargs: Kwargs
) -> Closed | None:
    """The closed form of an operation with one output; None for other operations.

    sources: the names of arguments that are parameters or computed from them, by identity, in a graph with the output.
    """
    tensors: Sequence[Tensor] = args[:1]
    pull: _Pull | None = None
    if name in ("einsum", "matmul"):
        terms = einsum_terms(name, args, kwargs)
        if terms is not None and any(factor.numel() > output.numel() for factor in terms[0]):
            tensors, words, result = terms
            pull = partial(_of_product, factors=tensors, words=words, result=result, output=output)
    elif name in _PRODUCTS and any(isinstance(arg, Tensor) and arg.shape != output.shape for arg in args):
        tensors = args
        pull = partial(_of_broadcast, factors=tensors, shape=output.shape)
    elif name in _TRANSFORMS:
        pull = partial(_of_transform, signal=args[0], output=output)
    elif name == "real.__get__" and args[0].is_complex():
        pull = partial(_of_real_part, dtype=args[0].dtype)
    if pull is None or len(tensors) > 2 or not all(isinstance(tensor, Tensor) for tensor in tensors):
        return None
    names = [sources.get(id(tensor)) for tensor in tensors]

    def gradients_of(part: PerExample) -> Gradients | None:
        return combine_by_name(names, pull(part))

    return gradients_of


def _of_product(
    part: PerExample, factors: Sequence[Tensor], words: Sequence[str], result: str, output: Tensor
) -> tuple[PerExample | None, ...]:
    """Those of two factors from those of their product in index notation."""
    if not isinstance(part, DenseGrad | FactoredGrad):
        return None, None
    grad_outputs = part.rows.view(-1, *output.shape)
    of_first = _of_factor(grad_outputs, result, factors[0], words[0], factors[1], words[1])
    return of_first, _of_factor(grad_outputs, result, factors[1], words[1], factors[0], words[0])


def _of_factor(
    grad_outputs: Tensor, result: str, factor: Tensor, word: str, other: Tensor, of_other: str
) -> PerExample | None:
    """Those of one factor; grad_outputs: [batch, ...], the gradients of the product. None for a sum over it alone."""
    other = other.detach().conj()
    sizes = dict(zip(result + of_other, (*grad_outputs.shape[1:], *other.shape), strict=True))
    is_stretched = any(sizes.get(letter) != size for letter, size in zip(word, factor.shape, strict=True))
    if is_stretched or factor.is_complex() != grad_outputs.is_complex():
        return None
    # For c = sum a b the gradient of a is sum conj(b) e, over all letters that a lacks. Where it lacks none there is no
    # sum, and the two factors stay apart.
    if any(size > 1 and letter not in word for letter, size in sizes.items()):
        rows = torch.einsum(f"{RECORD}{result},{of_other}->{RECORD}{word}", grad_outputs, other)
        return DenseGrad(rows.flatten(start_dim=1))
    return FactoredGrad(
        _in_order(grad_outputs, RECORD + result, RECORD + word),
        _in_order(other, of_other, word),
        factor.shape,
    )


def _in_order(values: Tensor, word: str, wanted: str) -> Tensor:
    """The dimensions in the order of other letters; those of one are added for letters that are missing, or dropped."""
    values = values[tuple(slice(None) if letter in wanted else 0 for letter in word)]
    word = "".join(letter for letter in word if letter in wanted)
    ordered = values.permute([word.index(letter) for letter in wanted if letter in word])
    return ordered[tuple(slice(None) if letter in word else None for letter in wanted)]


def _of_broadcast(
    part: PerExample, factors: Sequence[Tensor], shape: torch.Size
) -> tuple[PerExample | None, ...]:
    """Those of two factors, which are broadcast to the product's shape, from factored gradients of the product.

    None for other gradients, and for those of a view of another shape.
    """
    if not isinstance(part, FactoredGrad) or part.shape != shape:
        return None, None
    first, second = factors
    return _of_entries(part, first, second), _of_entries(part, second, first)


def _of_entries(part: FactoredGrad, factor: Tensor, other: Tensor) -> PerExample | None:
    if factor.is_complex() != part.values.is_complex():
        return None
    of_product = part.times(other.detach().conj())
    return of_product if factor.shape == part.shape else DenseGrad(of_product.summed_to(factor.shape))


def _of_transform(part: PerExample, signal: Tensor, output: Tensor) -> tuple[PerExample]:
    """Those of a signal from those of its Fourier transform."""
    grad_outputs = part.rows.view(-1, *output.shape).to(output.dtype)

    def of_record(grad_output: Tensor) -> Tensor:
        return torch.autograd.grad(output, signal, grad_output, retain_graph=True)[0]

    # The transform is linear, so that its adjoint is the same for all records.
    rows = torch.func.vmap(of_record)(grad_outputs)
    return (DenseGrad(rows.flatten(start_dim=1)),)


def _of_real_part(part: PerExample, dtype: torch.dtype) -> tuple[PerExample]:
    return (DenseGrad(part.rows.to(dtype)),)

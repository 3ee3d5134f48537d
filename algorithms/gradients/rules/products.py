"""Products of one parameter with values of the records, summed over any indices: einsum, matmul and similar functions.

In index notation, output[o] = sum over the other letters of weight[w] value[v]. For each record, the weight's gradient
is a sum of outer products of value and error, over the letters that both have but the weight lacks. So the product is a
linear layer on a sequence, up to the order of dimensions.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from algorithms.gradients.arithmetic import wide
from algorithms.gradients.block_gradients import BlockGrad, are_worth_blocks
from algorithms.gradients.grad_sample_recorder import (
    Args,
    Func,
    Gradients,
    GradSampleRecorder,
    Kwargs,
    Layout,
    for_complex,
    has_gradient,
    name_of,
)
from algorithms.gradients.parameter_gradients import DenseGrad, LinearGrad, PerExample, as_measured
from algorithms.gradients.rules.einsum_terms import LETTERS, RECORD, ROW, einsum_terms
from algorithms.gradients.rules.general import elementwise, general


@dataclass(frozen=True)
class Reordered:
    """Gradients of a weight, stored as gradients of the weight with permuted dimensions.

    of: gradients of the permuted weight, of shape `shape`. order: of these dimensions in the weight.
    """

    of: PerExample
    shape: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def is_materialized(self) -> bool:
        return self.of.is_materialized

    @cached_property
    def rows(self) -> Tensor:
        return self._reorder(self.of.rows)

    def square_norms(self) -> Tensor:
        return self.of.square_norms()

    def absolute_norms(self) -> Tensor:
        return self.of.absolute_norms()

    def square_distances(self, shift: Tensor, scale: Tensor, *, cancels: float) -> Tensor:
        # The inner gradients know the permuted weight, so shift and scale are brought to its order first.
        moved, scaled = (self._reorder(part, back=True) for part in (shift, scale))
        return self.of.square_distances(moved, scaled, cancels=cancels)

    def add_weighted(self, weights: Tensor, total: Tensor) -> None:
        added = torch.zeros_like(total)
        as_measured(self.of).add_weighted(weights, added)
        # Permuting the sum once costs d numbers; permuting each record's gradient would materialise it.
        ordered = added.view(self.shape).permute(self.order)
        total.view(ordered.shape).add_(ordered)

    def take(self, chosen: Tensor | slice) -> "Reordered":
        return Reordered(as_measured(self.of).take(chosen), self.shape, self.order)

    def double(self) -> "Reordered":
        return Reordered(as_measured(self.of).double(), self.shape, self.order)

    def _reorder(self, values: Tensor, *, back: bool = False) -> Tensor:
        """Reorder values [..., numel] to the weight's order, or back to the permuted order."""
        shape, order = self.shape, self.order
        if back:
            # The inverse permutation: dimension i of the permuted weight lies at order.index(i) of the weight.
            shape, order = tuple(shape[i] for i in order), tuple(map(order.index, range(len(order))))
        apart = torch.unflatten(values, -1, shape)
        first = apart.dim() - len(shape)
        return apart.permute(*range(first), *(first + i for i in order)).flatten(start_dim=first)


@for_complex
def product(recorder: GradSampleRecorder, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """A product of one parameter and other values; all other products are left to `general`."""
    terms = einsum_terms(name_of(func), args, kwargs)
    return (
        general(recorder, func, args, kwargs)
        if terms is None
        else _record_product(recorder, func, args, kwargs, *terms)
    )


def bilinear(recorder: GradSampleRecorder, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """output = first weight second + bias, for values [..., p] and [..., q], weight [o, p, q] and bias [o]."""
    *factors, bias = (*args, None) if len(args) == 3 else args
    if kwargs or len(factors) != 3:
        return general(recorder, func, args, kwargs)
    # "a" and "b" are the summed widths p and q, "c" is the output o; the letters after them are leading dimensions.
    around = LETTERS[3 : 2 + factors[0].dim()]
    words = (around + "a", around + "b", "cab")
    output = _record_product(recorder, func, tuple(factors), {}, factors, words, around + "c")
    return output if bias is None else elementwise(recorder, torch.add, (output, bias), {})


@for_complex
def product_and_sum(recorder: GradSampleRecorder, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """output = added + first second, for batches of matrices; any of the three may be the parameters."""
    if kwargs or len(args) != 3:
        return general(recorder, func, args, kwargs)
    added, *factors = args
    are_parameters = any(recorder.name(factor) is not None for factor in factors)
    output = product(recorder, torch.bmm, tuple(factors), {}) if are_parameters else torch.bmm(*factors)
    if recorder.name(added) is None:
        return output + added
    return elementwise(recorder, torch.add, (output, added), {})


def _record_product(
    recorder: GradSampleRecorder,
    func: Func,
    args: Args,
    kwargs: Kwargs,
    factors: Sequence[Tensor],
    words: Sequence[str],
    result: str,
) -> Any:
    # Two parameters in one product, or one twice, have a derivative that is no sum of outer products of values.
    at = [i for i, factor in enumerate(factors) if recorder.name(factor) is not None]
    layouts = tuple(recorder.layout_if_any(factor) for factor in factors)
    shapes = tuple(factor.shape for factor in factors)
    if len(at) != 1 or not all(map(has_gradient, factors)):
        return general(recorder, func, args, kwargs)
    plan = _plan(at[0], tuple(words), result, shapes, layouts, recorder.output_layout)
    if plan is None:
        return general(recorder, func, args, kwargs)
    name, batch = str(recorder.name(factors[at[0]])), recorder.batch
    others = [factor for i, factor in enumerate(factors) if i != at[0]]
    values = [factor.detach() for factor in others]

    def gradients(grad_outputs: Tensor) -> Gradients:
        # Of complex factors the gradient takes the conjugates; of real ones these are the same tensors.
        return {name: plan.gradient([value.conj() for value in values], grad_outputs, batch)}

    return recorder.keep(func(*args, **kwargs), gradients, *others)


class _Term(NamedTuple):
    """A tensor's layout, and the letters and sizes of all dimensions except the batch and broadcast ones."""

    layout: Layout | None
    letters: str
    sizes: tuple[int, ...]

    @staticmethod
    def of(word: str, shape: tuple[int, ...], layout: Layout | None, record: str) -> "_Term":
        # A size of 1 is broadcast or constant: it adds no index to a contraction, so its letter is dropped.
        letters_and_sizes = [
            (letter, n) for letter, n in zip(word, shape, strict=True) if letter != record and n > 1
        ]
        return _Term(
            layout, "".join(letter for letter, _ in letters_and_sizes), tuple(n for _, n in letters_and_sizes)
        )

    def by_record(self, values: Tensor, batch: int) -> tuple[Tensor, str]:
        """The values, batch first and in at least 32 bits, with their letters."""
        if self.layout is None:
            return wide(values).reshape(self.sizes), self.letters
        values, rows_per_record = wide(self.layout.by_record(values, batch)), self.layout.rows_per_record
        return values.reshape(batch, rows_per_record, *self.sizes), RECORD + ROW + self.letters


@dataclass(frozen=True)
class _Plan:
    """How a weight's gradients follow from the other factors and the output's gradient.

    word: the weight's letters. entering, leaving, blocks: those that only the other factors have, that only the output
    has, and that both have. along: one outer product for each index of these; letters that only the other factors have
    are summed before.
    """

    word: str
    terms: tuple[_Term, ...]
    back: _Term
    entering: str
    leaving: str
    blocks: str
    along: str

    def gradient(self, values: Sequence[Tensor], grad_outputs: Tensor, batch: int) -> PerExample:
        """From the other factors' values and the output's gradient."""
        # For out = einsum(W, x, ...), the gradient of W is the einsum of the other factors and grad_outputs to W's
        # letters. Without its sum over records it is a gradient for each record; without that over `along`, the outer
        # products that it consists of, whose two sides are the letters `entering` and `leaving` of W.
        parts = [term.by_record(each, batch) for term, each in zip(self.terms, values, strict=True)]
        grad_outputs, letters_of_output = self.back.by_record(grad_outputs, batch)
        # A letter of W in both, as of a product per head, is one of blocks, which have outer products of their own.
        # For W [h, o, i] and x [Z, t, h, i]: entering i, leaving o, blocks h, along Y t.
        apart = RECORD + self.blocks + self.along
        # [batch, *blocks, *along, *entering]
        inputs = _contract([part for part, _ in parts], [word for _, word in parts], apart + self.entering)
        # [batch, *blocks, *along, *leaving]
        grad_outputs = _contract((grad_outputs,), (letters_of_output,), apart + self.leaving)
        first, last = 1 + len(self.blocks), len(apart)
        shapes = (inputs.shape[1:first], grad_outputs.shape[last:], inputs.shape[last:])
        blocks, width_out, width_in = map(math.prod, shapes)
        length = math.prod(inputs.shape[first:last])
        if self.blocks and not are_worth_blocks(blocks, width_out, width_in):
            words = apart + self.entering, apart + self.leaving
            rows = _contract((inputs, grad_outputs), words, RECORD + self.word)  # [batch, *weight]
            return DenseGrad(rows.flatten(start_dim=1))
        # Letters of a kind are flattened into one: `along` is the sequence of a linear layer.
        around = (batch, blocks, length) if self.blocks else (batch, length)
        inputs, grad_outputs = inputs.reshape(*around, width_in), grad_outputs.reshape(*around, width_out)
        of_sides = BlockGrad if self.blocks else LinearGrad

        # [blocks, inputs, outputs]: a weight stored as its transpose swaps the two sides
        if self.word == self.blocks + self.entering + self.leaving:
            return of_sides(grad_outputs, inputs)
        # [blocks, outputs, inputs], the order of `LinearGrad` and `BlockGrad`
        if self.word == self.blocks + self.leaving + self.entering:
            return of_sides(inputs, grad_outputs)
        # W has the sides' letters in another order, so rows of outer products are permuted to it.
        order = map((self.blocks + self.leaving + self.entering).index, self.word)
        return Reordered(of_sides(inputs, grad_outputs), sum(map(tuple, shapes), ()), tuple(order))


@lru_cache(maxsize=4096)
def _plan(
    at: int,
    words: tuple[str, ...],
    result: str,
    shapes: tuple[torch.Size, ...],
    layouts: tuple[Layout | None, ...],
    out: Layout,
) -> _Plan | None:
    """The plan for a product of a weight, the factor `at`, with other factors; None if it has no such gradients."""
    record, size = result[out.dimension], dict[str, int]()  # the letter of the batch
    for word, shape, layout in zip(words, shapes, layouts, strict=True):
        # A weight must not carry the batch letter; each value must carry it with the output's rows per record.
        is_alike = (
            record not in word or shape[word.index(record)] == 1
            if layout is None
            else layout == Layout(word.find(record), out.rows_per_record)
        )
        if not is_alike:
            return None
        size |= {letter: n for letter, n in zip(word, shape, strict=True) if n > 1}
    # The output's sizes come from the factors, since its own tensor does not exist yet.
    terms = [_Term.of(*each, record) for each in zip(words, shapes, layouts, strict=True)]
    back = _Term.of(result, tuple(size.get(letter, 1) for letter in result), out, record)
    # The rows of a record ("Y") are in each output, so they are always among the outer products.
    letters, of_output, seen = (
        terms.pop(at).letters,
        ROW + back.letters,
        "".join(term.letters for term in terms),
    )
    if not set(letters) <= {*seen, *of_output}:  # a sum over the weight alone
        return None
    entering = "".join(letter for letter in letters if letter not in of_output)
    leaving = "".join(letter for letter in letters if letter not in seen)
    blocks = "".join(letter for letter in letters if letter not in entering + leaving)
    along = "".join(letter for letter in of_output if letter not in letters)
    return _Plan(letters, tuple(terms), back, entering, leaving, blocks, along)


def _contract(factors: Sequence[Tensor], words: Sequence[str], result: str) -> Tensor:
    # No letter is summed: a view of the factor is enough.
    if list(words) == [result]:
        return factors[0]
    if len(words) == 1 and len(words[0]) == len(result):
        return factors[0].permute([words[0].index(letter) for letter in result])
    return torch.einsum(f"{','.join(words)}->{result}", *factors)

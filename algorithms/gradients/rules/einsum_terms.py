"""Products of tensors in index notation: a letter for each dimension of the factors and of the product."""

from collections.abc import Sequence
from functools import lru_cache
from string import ascii_letters
from typing import Any

from torch import Tensor

from algorithms.gradients.grad_sample_recorder import Args, Kwargs

RECORD, ROW = "Z", "Y"
"""The letters of the batch dimension, and of consecutive values of one record within it."""

LETTERS = "".join(letter for letter in ascii_letters if letter not in (RECORD, ROW))


def einsum_terms(name: str, args: Args, kwargs: Kwargs) -> tuple[list[Tensor], Sequence[str], str] | None:
    """The factors with the letters of their dimensions, and those of the product; None for unsupported forms."""
    if name == "einsum" and isinstance(args[0], str) and not kwargs:
        factors = list(args[1] if isinstance(args[1], list | tuple) else args[1:])
        equation = _of_equation(args[0], tuple(factor.dim() for factor in factors))
    elif name == "tensordot":
        factors = list(args[:2])
        dims: Any = kwargs.get("dims", args[2] if len(args) > 2 else 2)
        if len(factors) != 2 or kwargs.get("out") is not None or isinstance(dims, Tensor):
            return None
        over = (range(-dims, 0), range(dims)) if isinstance(dims, int) else dims
        equation = _of_dimensions(tuple(part.dim() for part in factors), tuple(tuple(each) for each in over))
    else:
        factors = list(args[::-1] if name == "__rmatmul__" else args)
        if kwargs or len(factors) != 2:
            return None
        equation = _of_matrices(*(factor.dim() for factor in factors))
    return None if equation is None else (factors, *equation)


@lru_cache
def _of_equation(equation: str, dimensions: tuple[int, ...]) -> tuple[tuple[str, ...], str] | None:
    """The letters of an einsum equation; dots are replaced by unused letters."""
    before, arrow, result = equation.replace(" ", "").partition("->")
    words = before.split(",")
    named = {letter for letter in equation if letter.isalpha()}
    free = [letter for letter in LETTERS if letter not in named]
    # An equation of the user's that has Z or Y gets other letters there, as these two are the recorder's.
    apart = {letter: free.pop() for letter in (RECORD, ROW) if letter in named}
    # How many dimensions "..." stands for in each word.
    dots = [n - len(word.replace("...", "")) for n, word in zip(dimensions, words, strict=True)]
    around = "".join(
        free[: max((n for n, word in zip(dots, words, strict=True) if "..." in word), default=0)]
    )
    # Implicit output, as in NumPy: the letters that occur once, in alphabetical order.
    if not arrow:
        once = sorted(letter for letter in named if before.count(letter) == 1)
        result = ("..." if "..." in before else "") + "".join(once)
    # Broadcast dimensions are aligned at their right end, so a shorter word has the last of the letters.
    words = [word.replace("...", around[len(around) - n :]) for n, word in zip(dots, words, strict=True)]
    words = [
        "".join(apart.get(letter, letter) for letter in word)
        for word in (*words, result.replace("...", around))
    ]
    is_plain = all(len(set(word)) == len(word) for word in words)  # no diagonal
    return (tuple(words[:-1]), words[-1]) if is_plain else None


@lru_cache
def _of_matrices(first: int, second: int) -> tuple[tuple[str, ...], str] | None:
    """The letters of `matmul`, for factors with these numbers of dimensions."""
    if not first or not second:
        return None
    # "a" rows, "b" summed, "c" columns: `matmul` of [..., a, b] and [..., b, c]; a vector lacks its "a" or "c".
    around = LETTERS[3 : 1 + max(first, second)]
    rows, columns = "a" if first > 1 else "", "c" if second > 1 else ""
    words = tuple(
        around[len(around) - n + 2 :] + inside
        for n, inside in ((max(2, first), rows + "b"), (max(2, second), "b" + columns))
    )
    return words, around + rows + columns


@lru_cache
def _of_dimensions(
    dimensions: tuple[int, ...], over: tuple[tuple[int, ...], ...]
) -> tuple[tuple[str, ...], str] | None:
    """The letters of `tensordot`, which sums over some dimensions of each factor."""
    words = [list(LETTERS[: dimensions[0]]), list(LETTERS[dimensions[0] : sum(dimensions)])]
    for first, other in zip(*over, strict=True):
        words[1][other] = words[0][first]  # a summed dimension has the same letter in both
    summed = {words[0][index] for index in over[0]}
    result = "".join(letter for word in words for letter in word if letter not in summed)
    return tuple("".join(word) for word in words), result

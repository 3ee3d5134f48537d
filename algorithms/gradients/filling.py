"""Numbers of records at which no record's results depend on how many there are, or on its place among them.

A matrix product computes the rows that its kernel leaves over in another order, which changes their last bits. Where a
function has a kink, a last bit can decide a whole gradient; so one record more could turn the gradients of many others.
"""

from torch import Tensor, cat

WHOLE = 64
"""Records that fill the kernels of all products; multiples give the same bits, with `Engine.threads` on a CPU."""

FEWEST = 32
"""Fewer records than this do not fill them all, but for one, which has no place among others."""


def even(count: int, fewest: int = FEWEST) -> int:
    """The most records, at most `count`, that can be taken at once: a multiple of 64, or 32, or 1.

    fewest: of several at once; 64 where numbers are of 16 bits, of which a vector holds twice as many.
    """
    return count // WHOLE * WHOLE if count >= WHOLE else FEWEST if count >= fewest else 1


def together(count: int, most: int) -> int:
    """How many of `count` records to take at once, so that passes of at most `most` are about equally large.

    most: what `even` gave. A short last pass would cost as many calls as a full one.
    """
    passes = max(1, -(-count // most))
    return min(most, -(-count // (passes * WHOLE)) * WHOLE or most)


def filled(values: Tensor, step: int = WHOLE) -> Tensor:
    """Values of some records, [batch, ...], at least one, with the last repeated up to a multiple of `step`."""
    missing = -len(values) % step
    return cat([values, values[-1:].expand(missing, *values.shape[1:])]) if missing else values

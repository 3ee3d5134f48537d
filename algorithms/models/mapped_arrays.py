"""Arrays of more records than memory holds: they lie in a temporary file, which is mapped and has no name.

Whatever is computed of all rows is computed of some megabytes at a time, so that memory does not grow with the rows.
"""

import os
import tempfile
from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from algorithms.errors import RefusedError

MAX_IN_MEMORY = 2**28
"""Bytes of an array that is made in memory; a larger one is mapped."""
_CHUNK = 2**22


def new_array(shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """An array to be filled, mapped if it is large.

    A private temporary file has its room reserved, as a disk that is full later would kill the process. Raises
    RefusedError without that room.
    """
    size = prod(shape) * np.dtype(dtype).itemsize
    if size <= MAX_IN_MEMORY:
        return np.empty(shape, dtype)
    try:
        with tempfile.TemporaryFile(prefix="epsilonflow-") as file:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)
            else:  # on macOS
                file.truncate(size)
            return np.memmap(file, dtype, "r+", shape=shape)
    except OSError:
        raise RefusedError(
            f"the records are more than fits into memory, and {tempfile.gettempdir()} has no room for a file of them;"
            " set TMPDIR to a folder on a disk with more room."
        ) from None


def is_mapped(array: NDArray[Any]) -> bool:
    """Whether an array is in a mapped file, one of the user's own or of `new_array`."""
    return isinstance(array, np.memmap)


def row_chunks(array: NDArray[Any]) -> Iterator[slice]:
    """The rows of an array in slices of some megabytes.

    Example:
        >>> [(some.start, some.stop) for some in row_chunks(np.zeros((5, 2**18)))]
        [(0, 2), (2, 4), (4, 6)]
    """
    size = max(1, _CHUNK // max(1, prod(array.shape[1:]) * array.itemsize))
    return (slice(start, start + size) for start in range(0, len(array), size))


def is_finite(array: NDArray[Any]) -> bool:
    """Whether all numbers are finite."""
    return all(np.isfinite(array[rows]).all() for rows in row_chunks(array))


def as_type(array: NDArray[Any], dtype: DTypeLike) -> NDArray[Any]:
    """The array in a type and in C order; a mapped one stays mapped."""
    if array.dtype == dtype and array.flags.c_contiguous:
        return array
    if not is_mapped(array):
        return np.asarray(array, dtype, order="C")
    converted = new_array(array.shape, dtype)
    for rows in row_chunks(array):
        converted[rows] = array[rows]
    return converted


def take_rows(array: NDArray[Any], index: NDArray[np.intp]) -> NDArray[Any]:
    """The rows of an array at indices [k, ...], shape [k, ..., *array.shape[1:]]; of a mapped array a mapped one."""
    if not is_mapped(array):
        return array[index]
    rows = new_array((*index.shape, *array.shape[1:]), array.dtype)
    for chunk in row_chunks(rows):
        rows[chunk] = array[index[chunk]]
    return rows

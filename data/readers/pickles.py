"""Python pickles of plain values and arrays of bytes, read without running anything that they name."""

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray


@dataclass
class Bytes:
    """What stands in for a NumPy array while its pickle is read: its parts, of which nothing is made yet."""

    parts: tuple[Any, ...] = ()

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.parts = state

    def array(self) -> NDArray[np.uint8]:
        """The array; raises ValueError when it is none of unsigned bytes, row by row."""
        if len(self.parts) != 5 or not isinstance(self.parts[4], bytes):
            raise ValueError("no array of bytes")
        _, shape, kind, is_by_columns, content = self.parts
        if not isinstance(kind, _Kind) or kind.code not in (b"u1", "u1") or is_by_columns:
            raise ValueError("no array of unsigned bytes, row by row")
        return np.frombuffer(content, np.uint8).reshape(shape)


@dataclass
class _Kind:
    code: object

    def __setstate__(self, state: object) -> None:
        """Byte order and alignment, which bytes do not have."""


def _array(*_arguments: object) -> Bytes:
    return Bytes()


def _kind(code: object, *_arguments: object) -> _Kind:
    return _Kind(code)


_STAND_INS: Mapping[tuple[str, str], Callable[..., object]] = {
    ("numpy.core.multiarray", "_reconstruct"): _array,
    ("numpy", "ndarray"): _array,
    ("numpy", "dtype"): _kind,
}
"""All that a pickled array of bytes names: each is replaced by what cannot do anything."""


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Callable[..., object]:
        """What stands in for a name; the pickle gets nothing else to call."""
        if (module, name) not in _STAND_INS:
            raise pickle.UnpicklingError("the pickle names something that no array of bytes needs")
        return _STAND_INS[module, name]


def load(file: IO[bytes]) -> object:
    """The plain value in a pickle that Python 2 wrote, its text as bytes and its arrays as `Bytes`.

    Raises pickle.UnpicklingError when the pickle names anything else, and what a broken one makes Python raise.
    """
    return _Plain(file, encoding="bytes").load()

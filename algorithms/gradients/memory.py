"""Errors for lack of memory, which depend on the machine and on the other records, not on a record itself."""

import torch

_WORDS = ("can't allocate memory", "ALLOC_FAILED")
"""What PyTorch's allocator on a CPU and the libraries of a GPU say, in a RuntimeError."""


def lacks_memory(error: BaseException) -> bool:
    """Whether memory did not suffice, on any device."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(
        word in str(error) for word in _WORDS
    )

"""The memory that a method's steps need on a GPU beyond the model and the data."""

import torch

from benchmarks.methods import Method

_STEPS = 3


def growth_on_gpu(method: Method, name: str) -> float:
    """Peak memory of the allocator in three steps minus memory before them, in MB."""
    if name == "jax":
        return _growth_of_jax(method)
    torch.accelerator.synchronize()
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    run_steps(method)
    return (torch.accelerator.max_memory_allocated() - before) / 1e6


def _growth_of_jax(method: Method) -> float:
    """JAX has its own allocator, whose peak cannot be reset and may include what compiling needed."""
    import jax

    device = jax.devices()[0]
    before = device.memory_stats()["bytes_in_use"]
    run_steps(method)
    return (device.memory_stats()["peak_bytes_in_use"] - before) / 1e6  # type: ignore[no-any-return]


def run_steps(method: Method) -> None:
    """A few steps, and the wait for their end."""
    for _ in range(_STEPS):
        method.step()
    method.wait()

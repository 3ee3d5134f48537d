"""The device that a run asks for, by its name."""

import logging

import torch

from algorithms.errors import RefusedError
from algorithms.gradients.devices import make_products_repeatable, why_not_64_bits

_LOG = logging.getLogger(__name__)


def device_of(name: str) -> torch.device:
    """The device for "auto", which prefers an accelerator, "cpu", or the name of an accelerator, such as "cuda".

    On an accelerator, this makes PyTorch deterministic. Raises RefusedError for a device that is not there, or that
    lacks 64-bit numbers, in which all sums over records are added; "auto" then means the CPU.
    """
    here = torch.accelerator.current_accelerator(check_available=True)
    if name == "cpu" or (name == "auto" and here is None):
        return torch.device("cpu")
    if here is None or name not in ("auto", here.type):
        choice = "auto or cpu" if here is None else f"auto, cpu or {here.type}"
        raise RefusedError(
            "{compute.device} is {name}, but PyTorch sees no such device here; set it to {choice}.",
            code="device_missing",
            name=name,
            choice=choice,
        )
    lacking = why_not_64_bits(here)
    if lacking is not None:
        problem = f"{here.type} lacks 64-bit numbers, in which all sums over records are added ({lacking})"
        if name == "auto":
            _LOG.warning("%s, so the CPU computes", problem)
            return torch.device("cpu")
        raise RefusedError(
            "{compute.device} is {name}, but {problem}; set it to cpu.",
            code="device_without_64_bits",
            name=name,
            problem=problem,
        )
    _make_deterministic()
    return here


def _make_deterministic() -> None:
    """A resumed run repeats every bit; PyTorch refuses operations that cannot."""
    make_products_repeatable()
    # `use_deterministic_algorithms` would import the compiler as well, in over a second of each run.
    torch.set_deterministic_debug_mode("error")
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined] # else each is filled


def device_name(device: torch.device) -> str:
    """The product name of an accelerator, or its kind if PyTorch does not tell the name."""
    module = torch.get_device_module(device)
    return str(module.get_device_name()) if hasattr(module, "get_device_name") else device.type

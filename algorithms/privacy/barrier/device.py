"""The device that a run asks for, by its name."""

import logging
import os

import torch

from algorithms.errors import RefusedError

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
    lacking = None if here.type == "cuda" else _why_not_64_bits(here)
    if lacking is not None:
        said = f"{here.type} lacks 64-bit numbers, in which all sums over records are added ({lacking})"
        if name == "auto":
            _LOG.warning("%s, so the CPU computes", said)
            return torch.device("cpu")
        raise RefusedError(
            "{compute.device} is {name}, but {said}; set it to cpu.",
            code="device_without_64_bits",
            name=name,
            said=said,
        )
    _make_deterministic()
    return here


def _why_not_64_bits(device: torch.device) -> str | None:
    """Why a device cannot hold 64-bit numbers, in PyTorch's words; None if it can."""
    try:
        torch.zeros(1, dtype=torch.float64, device=device)
    except (RuntimeError, TypeError) as error:
        return str(error).partition("\n")[0]
    return None


def _make_deterministic() -> None:
    """A resumed run repeats every bit; PyTorch refuses operations that cannot."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined] # else each is filled


def device_name(device: torch.device) -> str:
    """The product name of an accelerator, or its kind if PyTorch does not tell the name."""
    module = torch.get_device_module(device)
    return str(module.get_device_name()) if hasattr(module, "get_device_name") else device.type

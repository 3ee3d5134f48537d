"""The machine and package versions of a measurement."""

import os
import platform
import re
from importlib import metadata
from pathlib import Path

import torch

from algorithms.privacy.barrier.device import device_name

_PACKAGES = ("torch", "opacus", "jax", "jaxlib", "optax", "numpy")


def describe(device: torch.device) -> dict[str, str | int]:
    """Processor, its number of cores, GPU and system."""
    about: dict[str, str | int] = {
        "cpu": _processor(),
        "cores": os.cpu_count() or 0,
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
    }
    if device.type != "cpu":
        about["gpu"] = device_name(device)
    return about


def versions() -> dict[str, str]:
    """The measured packages' versions; a package that is not installed is left out."""
    versions_of = {}
    for name in _PACKAGES:
        try:
            versions_of[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions_of


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    match = re.search(r"model name\s*:\s*(.+)", cpuinfo.read_text()) if cpuinfo.exists() else None
    return match[1] if match else platform.processor()

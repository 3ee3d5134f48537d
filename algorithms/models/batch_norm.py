"""BatchNorm layers mix the records of a batch; here they are found, and replaced by GroupNorm."""

from math import gcd
from typing import Any

from torch import nn

_GROUPS = 32


def batch_norm_layers(module: nn.Module) -> list[str]:
    """The names of the BatchNorm layers; "" if the module itself is one."""
    layers = module.named_modules()
    return [name for name, layer in layers if isinstance(layer, nn.modules.batchnorm._BatchNorm)]


def replace_batch_norm(module: nn.Module) -> nn.Module:
    """Replace each BatchNorm by a GroupNorm, as private training requires.

    Weights start at 1 and biases at 0, since those of a BatchNorm belong to its statistics. There are 32 groups, or the
    largest smaller number that divides the channels into groups of two or more: a group of one channel with one pixel
    would always be normalised to 0.

    Args:
        module: Changed in place, unless it is a BatchNorm itself.

    Returns:
        The module, or the GroupNorm that it became.

    Example:
        >>> module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        >>> norm = replace_batch_norm(module).get_submodule("1")
        >>> norm.num_groups, norm.num_channels
        (4, 8)
    """
    for name in batch_norm_layers(module):
        parent, _, last = name.rpartition(".")
        batch_norm: Any = module.get_submodule(name)
        channels = int(batch_norm.num_features)
        groups = gcd(_GROUPS, channels)
        groups = groups if groups < channels else max(1, channels // 2)
        norm: nn.Module = nn.GroupNorm(
            groups, channels, eps=float(batch_norm.eps), affine=bool(batch_norm.affine)
        )
        # timm's BatchNormAct2d has its activation inside
        parts = [getattr(batch_norm, part) for part in ("drop", "act") if hasattr(batch_norm, part)]
        norm = nn.Sequential(norm, *parts) if parts else norm
        if not name:
            return norm
        setattr(module.get_submodule(parent), last, norm)
    return module

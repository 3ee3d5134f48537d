"""GroupNorm in place of BatchNorm, which mixes the records of a batch."""

from math import gcd

from torch import nn

_GROUPS = 32


def batch_norm_layers(module: nn.Module) -> list[str]:
    """The names of the BatchNorm layers; "" where the module is one itself."""
    layers = module.named_modules()
    return [name for name, layer in layers if isinstance(layer, nn.modules.batchnorm._BatchNorm)]


def replace_batch_norm(module: nn.Module) -> nn.Module:
    """Puts a GroupNorm in place of each BatchNorm, as private training needs it.

    Its weights are 1 and its biases 0: what a BatchNorm has learned belongs to its statistics. Groups are 32, or the
    most below that divide the channels, each of two channels or more, since one channel of one place is always 0.

    Args:
        module: Changed in place, but for one that is a BatchNorm itself.

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
        replaced = _group_norm(module.get_submodule(name))
        if not name:
            return replaced
        setattr(module.get_submodule(parent), last, replaced)
    return module


def _group_norm(found: nn.Module) -> nn.Module:
    channels = int(found.num_features)  # type: ignore[arg-type]
    groups = gcd(_GROUPS, channels)
    groups = groups if groups < channels else max(1, channels // 2)
    norm = nn.GroupNorm(groups, channels, eps=float(found.eps), affine=bool(found.affine))  # type: ignore[arg-type]
    # timm's BatchNormAct2d has its activation inside
    parts = [getattr(found, part) for part in ("drop", "act") if hasattr(found, part)]
    return nn.Sequential(norm, *parts) if parts else norm

"""Sums over all records of a linear model with one output, in C++, for who asks for it (`performance.compiled`).

PyTorch builds them at their first use on a machine, in some ten seconds, and the library is kept with its other
extensions. They read features in 32 bits and sum up in 64, for which PyTorch's own product needs a copy of all
features in 64.
"""

import functools
import hashlib
import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

_LOG = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_suffix(".cpp")
_ALWAYS = ("-O3", "-fopenmp-simd")
_VECTORS = {
    "AVX512": ("-mavx512f", "-mavx512dq", "-mavx512vl", "-mavx512bw", "-mfma"),
    "AVX2": ("-mavx2", "-mfma"),
}
"""Flags by what PyTorch finds that the processor can."""


class NotCompiled(Exception):
    """The library cannot be built or loaded here; the message says what is missing."""


@functools.cache
def load() -> None:
    """Loads the library, which is built first where there is none for this version of PyTorch and this processor.

    Raises NotCompiled where there is no compiler, no ninja or none that can.
    """
    library = _place()
    if not library.exists():
        return _build(library)
    try:
        torch.ops.load_library(library)  # type: ignore[no-untyped-call]
    except OSError as error:
        raise NotCompiled(f"{library} cannot be loaded") from error


def weighted_sums(features: Tensor, weights: Tensor) -> Tensor:
    """features @ weights; [p, n] float32, [n] float64, on the CPU -> [p], float64."""
    load()
    return _operation("weighted_sums")(features, weights)


def logistic_losses(margins: Tensor, slopes: Tensor, steps: Tensor, *, bound: float, most: float) -> Tensor:
    """The sums [k], float64, over records of log(1 + exp(m)), at most log(most), at m = margins - steps[j] * slopes.

    margins, slopes: [n], float32. steps: [k], float64. bound: what log(most) does not exceed, at most 700. A margin
    that is not a number counts as zero.
    """
    load()
    return _operation("logistic_losses")(margins, slopes, steps, bound, most)


def _operation(name: str) -> Callable[..., Tensor]:
    found: Callable[..., Tensor] = getattr(torch.ops.epsilonflow, name).default
    return found


def _flags() -> list[str]:
    capability = torch.backends.cpu.get_cpu_capability()
    if capability not in _VECTORS:
        return [*_ALWAYS, "-DCPU_CAPABILITY=DEFAULT", "-DCPU_CAPABILITY_DEFAULT"]
    named = f"-DCPU_CAPABILITY={capability}", f"-DCPU_CAPABILITY_{capability}"
    return [*_ALWAYS, *named, *_VECTORS[capability]]


def _place() -> Path:
    """Where the library is, under a name that no other source, PyTorch or processor has."""
    from torch.utils.cpp_extension import get_default_build_root

    made_of = [_SOURCE.read_text(encoding="utf-8"), torch.__version__, *_flags()]
    digest = hashlib.sha256("\n".join(made_of).encode()).hexdigest()[:16]
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    return root / "epsilonflow" / f"sums-{digest}.so"


def _build(library: Path) -> None:
    """Builds and loads, in a folder of its own, so that neither a second process nor a killed one is in the way."""
    from torch.utils import cpp_extension

    _LOG.info("compiling sums in C++; this takes some ten seconds, once")
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        try:
            cpp_extension.load(
                "sums",
                [str(_SOURCE)],
                extra_cflags=_flags(),
                build_directory=folder,
                is_python_module=False,
            )
        except (RuntimeError, OSError) as error:
            raise NotCompiled("there is no C++ compiler with ninja that can build it") from error
        os.replace(Path(folder) / "sums.so", library)

"""Sums over all records of a linear model with one output, in C++, for who asks for it (`performance.compiled`).

They are built at their first use on a machine, in some ten seconds, by PyTorch's extension mechanism, and kept in the
user's cache folder. They read features in 32 bits and sum up in 64, for which PyTorch's own product needs a copy of all
features in 64, and take one thread.
"""

import functools
import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import platformdirs
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

_BUILD = (
    "import json, sys; from torch.utils import cpp_extension; cpp_extension.load(**json.loads(sys.argv[1]))"
)
_BUILDING, _LEFT_AFTER = "building-", 3600.0
"""What the folders of builds begin with, and how old one is, in seconds, that nobody builds in any more."""

_LOCK = threading.Lock()


class NotCompiled(Exception):
    """The library cannot be built or loaded here; the message says why and what to do about it."""


def load() -> None:
    """Loads the library, which is built first where there is none for this version of PyTorch and this processor.

    Raises NotCompiled where that cannot be done, or where what is there is another user's.
    """
    with _LOCK:
        _load_once(_place())


def weighted_sums(features: Tensor, weights: Tensor) -> Tensor:
    """features @ weights, after `load`; [p, n] and [n], float32 on the CPU -> [p], float64."""
    return _operation("weighted_sums")(features, weights)


def logistic_losses(margins: Tensor, slopes: Tensor, steps: Tensor, *, bound: float, most: float) -> Tensor:
    """The sums [k], float64, over records of log(1 + exp(m)), at most log(most), at m = margins - steps[j] * slopes.

    To be asked after `load`. margins, slopes: [n], float32. steps: [k], float64. bound: what log(most) does not exceed,
    at most 700. A margin that is not a number counts as zero.
    """
    return _operation("logistic_losses")(margins, slopes, steps, bound, most)


def _operation(name: str) -> Callable[..., Tensor]:
    found: Callable[..., Tensor] = getattr(torch.ops.epsilonflow, name).default
    return found


@functools.cache
def _load_once(library: Path) -> None:
    try:
        if not library.exists():
            _build(library)
        _check_owner(library)
    except OSError as error:
        raise NotCompiled(f"{library.parent} cannot be used ({error.strerror}); make it yours") from error
    try:
        torch.ops.load_library(library)  # type: ignore[no-untyped-call]
        ones = torch.ones(2, 3)
        is_right = _operation("weighted_sums")(ones, ones[0]).tolist() == [3.0, 3.0]
    except (OSError, AttributeError):
        is_right = False
    if not is_right:
        raise NotCompiled(f"{library} is damaged; remove it")


def _check_owner(library: Path) -> None:
    """What is loaded runs beside the records: it must be nobody else's."""
    for path in (library, library.parent):
        status = path.stat()
        if status.st_uid != os.getuid() or status.st_mode & 0o022:
            raise NotCompiled(f"{path} is another user's, or others may write to it; make it yours alone")


def _flags() -> list[str]:
    capability = torch.backends.cpu.get_cpu_capability()
    if capability not in _VECTORS:
        return [*_ALWAYS, "-DCPU_CAPABILITY=DEFAULT", "-DCPU_CAPABILITY_DEFAULT"]
    named = f"-DCPU_CAPABILITY={capability}", f"-DCPU_CAPABILITY_{capability}"
    return [*_ALWAYS, *named, *_VECTORS[capability]]


def _place() -> Path:
    """Where the library is, under a name that no other source, PyTorch or processor has."""
    made_of = [_SOURCE.read_text(encoding="utf-8"), torch.__version__, *_flags()]
    digest = hashlib.sha256("\n".join(made_of).encode()).hexdigest()[:16]
    return platformdirs.user_cache_path("epsilonflow").absolute() / "compiled" / f"sums-{digest}.so"


def _build(library: Path) -> None:
    """Builds in a folder of its own, so that neither a second process nor a killed one is in the way."""
    _LOG.info("compiling sums in C++; this takes some ten seconds, once")
    library.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _sweep(library.parent)
    with tempfile.TemporaryDirectory(prefix=_BUILDING, dir=library.parent) as folder:
        _compile(folder)
        built = Path(folder) / "sums.so"
        built.chmod(0o700)
        with built.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(built, library)


def _compile(folder: str) -> None:
    """In a process of its own, since PyTorch loads what it builds from where it is built."""
    wanted: dict[str, Any] = {
        "name": "sums",
        "sources": [str(_SOURCE)],
        "extra_cflags": _flags(),
        "build_directory": folder,
        "is_python_module": False,
    }
    beside = (
        f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"  # where ninja may be
    )
    command = [sys.executable, "-c", _BUILD, json.dumps(wanted)]
    done = subprocess.run(command, env=os.environ | {"PATH": beside}, capture_output=True, check=False)
    if done.returncode != 0:
        raise NotCompiled("no C++ compiler here can build it; install one and epsilonflow[compiled]")


def _sweep(folder: Path) -> None:
    """Removes what builds left that were killed."""
    for left in folder.glob(f"{_BUILDING}*"):
        if time.time() - left.stat().st_mtime > _LEFT_AFTER:
            shutil.rmtree(left, ignore_errors=True)

"""A simulated accelerator, the PyTorch device "sim", which `sim.cpp` makes of PyTorch's CPU build.

It is compiled once for all test runs on a machine, and seen by the product only within `available()`.
"""

import functools
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import types
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torchgen
import yaml
from filelock import FileLock
from platformdirs import user_cache_path
from torch import distributed
from torch.utils import backend_registration, cpp_extension

from tests.support.checkout import PROJECT

SOURCES = tuple(Path(__file__).with_name(name) for name in ("sim.cpp", "host_copies.cpp"))
TORCH = "2.13"
"""The C++ interfaces of devices change with PyTorch's minor versions."""
FLAGS = ("-shared", "-fPIC", "-std=c++20", "-O1", "-w", "-DTORCH_EXTENSION_NAME=simulator")
LIBRARIES = ("-lc10", "-ltorch_cpu", "-ltorch_python")


def why_not() -> str | None:
    """Why the device cannot be made here; None if it can."""
    if platform.system() != "Linux":
        return "the simulated accelerator needs Linux"
    if torch.version.cuda or torch.version.hip:
        return "the simulated accelerator needs PyTorch's CPU build"
    if not torch.__version__.startswith(f"{TORCH}."):
        return f"the simulated accelerator is written for torch {TORCH}, and this is {torch.__version__}"
    if shutil.which("g++") is None:
        return "the simulated accelerator needs a compiler, g++"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "the simulated accelerator needs Python's headers"
    return None


def library() -> Path:
    """The compiled device, kept outside the checkout by what it is made of; one process compiles it for all."""
    made_of = (*(source.read_text() for source in SOURCES), FLAGS, LIBRARIES, torch.__version__, sys.version)
    name = hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]
    path = user_cache_path("epsilonflow-tests") / f"simulator-{name}.so"
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock")):
        if not path.exists():
            partial = path.with_suffix(".partial")
            headers = [*cpp_extension.include_paths(), sysconfig.get_path("include")]
            folders = [f"-I{one}" for one in headers] + [f"-L{one}" for one in cpp_extension.library_paths()]
            command = ["g++", *FLAGS, "-o", str(partial), *map(str, SOURCES), *folders, *LIBRARIES]
            subprocess.run(command, check=True)
            partial.rename(path)
    return path


@functools.cache
def device_library() -> Any:
    """Load the device into this process, where it stays; nobody sees it until it is available."""
    backend_registration.rename_privateuse1_backend("sim")
    spec = importlib.util.spec_from_file_location("simulator", library())
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    loaded.allow_scalars(_operators_that_take_scalars())
    generator = loaded.default_generator()
    module: Any = types.ModuleType("torch.sim")
    module.is_available = module.is_initialized = lambda: False
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.set_device = lambda _device: None
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = module.manual_seed = generator.manual_seed
    module.get_rng_state = lambda _device="sim": generator.get_state()
    module.set_rng_state = lambda state, _device="sim": generator.set_state(state)
    module.default_generators = (generator,)
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.synchronize = lambda _device=None: loaded.synchronize()
    torch._register_device_module("sim", module)
    distributed.Backend.register_backend("host_copies", _host_copies, devices=["sim"])
    backend_registration.generate_methods_for_privateuse1_backend()
    return loaded


def _operators_that_take_scalars() -> list[str]:
    """The operators whose CUDA kernels take 0-dim CPU tensors: those that PyTorch's wrappers do not check."""
    path = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
    entries = yaml.load(path.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    table = {entry["func"].partition("(")[0]: entry for entry in entries}
    delegates = {name: table.get(entry.get("structured_delegate", ""), {}) for name, entry in table.items()}
    unchecked = [
        n for n in table if "NoCheck" in (table[n].get("device_check"), delegates[n].get("device_check"))
    ]
    return [f"aten::{name}" for name in unchecked]


def _host_copies(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    return device_library().host_copies(distributed.ProcessGroupGloo(store, rank, size, timeout))


@contextmanager
def available() -> Iterator[torch.device]:
    """Let PyTorch and the product see the device within the block."""
    device_library()
    module = torch.get_device_module("sim")
    module.is_available = module.is_initialized = lambda: True
    try:
        yield torch.device("sim")
    finally:
        module.is_available = module.is_initialized = lambda: False


@contextmanager
def hidden() -> Iterator[None]:
    """Let nobody see the device within the block, inside of `available`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.get_device_module("sim"), "is_available", lambda: False)
        yield


@dataclass(frozen=True)
class Event:
    """What the device did.

    kind: h2d, d2h, item, wait or sync (the host waits for the device); h2d staged, h2d later or d2h later (a copy that
    nobody waits for); or what a test adds. functions: those of the product that led to it, as module.function,
    the innermost first. tensor: what went to the device.
    """

    kind: str
    functions: tuple[str, ...] = ()
    bytes: int = 0
    tensor: torch.Tensor | None = None

    @property
    def is_wait(self) -> bool:
        return self.kind in ("h2d", "d2h", "item", "wait", "sync")


@dataclass
class Events:
    """What the device did, in order."""

    all: list[Event] = field(default_factory=list)

    def add(self, kind: str, _operator: str, size: int, _stream: int, tensor: torch.Tensor | None) -> None:
        copy = tensor.detach().clone() if tensor is not None and kind.startswith("h2d") else None
        self.all.append(Event(kind, _product_functions(), size, copy))

    @property
    def waits(self) -> Counter[str]:
        """How often each function of the product waits."""
        return Counter(event.functions[0] for event in self.all if event.is_wait)

    @property
    def bytes_to_device(self) -> int:
        return sum(event.bytes for event in self.all if event.kind.startswith("h2d"))


def _product_functions() -> tuple[str, ...]:
    functions = []
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None:
        path, name = frame.f_code.co_filename, frame.f_code.co_name
        if path.startswith(f"{PROJECT / 'algorithms'}{os.sep}") and not name.startswith("<"):
            functions.append(f"{Path(path).stem}.{name}")
        frame = frame.f_back
    return (*functions, "none of the product")


@contextmanager
def recorded() -> Iterator[Events]:
    """Record what the device does within the block."""
    events = Events()
    device_library().listen(events.add)
    try:
        yield events
    finally:
        device_library().listen(None)


def races_in(run: Callable[[], object]) -> int:
    """How many accesses nothing ordered, without an error at the first."""
    device = device_library()
    before = device.races()
    device.raise_on_race(False)
    try:
        run()
    finally:
        device.raise_on_race(True)
    return int(device.races() - before)

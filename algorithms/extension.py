"""Parts that are named `package.module:factory` in params.yaml, for what is not shipped and in no registry."""

import hashlib
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any


class NotUsableError(ValueError):
    """A part that is named `package.module:factory` and cannot be had; the message says what to write."""


def is_own(name: str) -> bool:
    """Whether a name is one of a part that is not shipped."""
    return ":" in name


def imported(name: str, what: str) -> Any:
    """The factory that `package.module:factory` names; what: a model, ... Raises NotUsableError where there is none."""
    module, _, factory = name.partition(":")
    form = "write package.module:factory, of a package that can be imported here"
    try:
        found = getattr(import_module(module), factory)
    except AttributeError:
        raise NotUsableError(
            f"{what} {name!r} was asked for, but {module} has no {factory!r}; {form}."
        ) from None
    except Exception as error:
        why = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise NotUsableError(
            f"{what} {name!r} was asked for, but {module!r} cannot be imported ({why}); {form}."
        ) from None
    if not callable(found):
        raise NotUsableError(f"{what} {name!r} was asked for, but {factory} cannot be called; {form}.")
    return found


def source_digest(name: str) -> str:
    """SHA-256 of the source of all modules of the package that `package.module:factory`, or a module's name, is in.

    All of them, since one module may take its parts from another. Of what is shipped here, the one module.
    """
    module = name.partition(":")[0]
    package = module if module.startswith("algorithms.") else module.partition(".")[0]
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise NotUsableError(
            f"the source of {name!r} is not to be found; keep it in a package with an __init__.py."
        )
    file = Path(spec.origin)
    files = sorted(file.parent.rglob("*.py")) if file.name == "__init__.py" else [file]
    digest = hashlib.sha256()
    for path in files:
        content = path.read_bytes()
        digest.update(f"{path.relative_to(file.parent).as_posix()} {len(content)} ".encode() + content)
    return digest.hexdigest()

"""Imports the user's own parts, which params.yaml names as `package.module:factory`."""

import hashlib
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any


class NotUsableError(ValueError):
    """A `package.module:factory` that cannot be imported or called; the message says what to write."""


def is_own(name: str) -> bool:
    """Whether a name has the form `package.module:factory`."""
    return ":" in name


def imported(name: str, what: str) -> Any:
    """Import the factory `package.module:factory`; raises NotUsableError if it fails. what: such as "a model"."""
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
    """SHA-256 of the source of the whole package, as its modules may import each other; for `algorithms`, one module.

    name: `package.module:factory`, or the name of a module. Raises NotUsableError if the source is not found.
    """
    module = name.partition(":")[0]
    package = module if module.startswith("algorithms.") else module.partition(".")[0]
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise NotUsableError(
            f"the source of {name!r} cannot be found; keep it in a package with an __init__.py, in the folder of the"
            " project or installed."
        )
    file = Path(spec.origin)
    files = sorted(file.parent.rglob("*.py")) if file.name == "__init__.py" else [file]
    digest = hashlib.sha256()
    for path in files:
        content = path.read_bytes()
        digest.update(f"{path.relative_to(file.parent).as_posix()} {len(content)} ".encode() + content)
    return digest.hexdigest()

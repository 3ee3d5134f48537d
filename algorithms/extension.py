"""Imports the user's own parts, which params.yaml names as `package.module:factory`."""

import hashlib
from collections.abc import Collection
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any


class NotUsableError(ValueError):
    """A `package.module:factory` that cannot be imported or called; the message says what to write."""


def is_own(name: str) -> bool:
    """Whether a name has the form `package.module:factory`."""
    return ":" in name


def check_allowed(name: str, allow_code: Collection[str], file: str) -> None:
    """Raise NotUsableError if a file names code of the user's own that is not allowed.

    An import runs code, and the factory is called with what the file says: a file that may come from elsewhere must
    not choose what that is.

    Args:
        name: What the file names, such as a shipped model or `package.module:factory`.
        allow_code: The names that are allowed, because the user has chosen them elsewhere.
        file: Which file it is, for the message.
    """
    if is_own(name) and name not in allow_code:
        raise NotUsableError(
            f"{file} names code, {name!r}, which would run here; if it is yours and you trust it with what the file"
            f" says, allow it by --allow-code {name} (in Python allow_code=[{name!r}])."
        )


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

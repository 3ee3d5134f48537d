"""Imports the user's own parts, which settings name as `package.module:factory`."""

import ast
import hashlib
import sys
from collections.abc import Collection, Iterable
from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from algorithms.errors import RefusedError

_NOT_THE_USERS = {*sys.stdlib_module_names, "algorithms", "data", "epsilonflow", "flows", "tasks"}
"""Python's own packages and ours, which are no code of the user's own."""


class NotUsableError(RefusedError):
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
            "{file} names code, {name!r}, which would run here; if it is yours and you trust it with what the file"
            " says, allow it by allow_code=[{name!r}].",
            code="code_not_allowed",
            file=file,
            name=name,
        )


def import_factory(name: str, what: str) -> Any:
    """Import the factory `package.module:factory`; raises NotUsableError if it fails. what: such as "a model"."""
    module, _, factory = name.partition(":")
    form = "write package.module:factory, of a package that can be imported here"
    try:
        imported = getattr(import_module(module), factory)
    except AttributeError:
        raise NotUsableError(
            f"{what} {name!r} was asked for, but {module} has no {factory!r}; {form}."
        ) from None
    except Exception as error:
        why = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise NotUsableError(
            f"{what} {name!r} was asked for, but {module!r} cannot be imported ({why}); {form}."
        ) from None
    if not callable(imported):
        raise NotUsableError(f"{what} {name!r} was asked for, but {factory} cannot be called; {form}.")
    return imported


def source_digest(name: str) -> str:
    """SHA-256 of the source of a package or module, and of all that it imports from the user's own code.

    Of a package that is its whole folder, as modules may import each other. Imports are found by their statements, and
    by `import_module` with a literal name; what they reach is followed in turn, unless it is part of Python, of
    epsilonflow or of an installed package. Without such imports the digest is that of the package or module alone. For
    `algorithms` it is that of one module.

    name: `package.module:factory`, or the name of a module. Raises NotUsableError if the source is not found.
    """
    module = name.partition(":")[0]
    package = module if module.startswith("algorithms.") else module.partition(".")[0]
    spec = find_spec(package)
    if spec is None or not spec.has_location:
        raise NotUsableError(
            f"the source of {name!r} cannot be found; keep it in a package with an __init__.py, in the folder of the"
            " project or installed."
        )
    digest = hashlib.sha256()
    sources = {package: _source_files(spec)}
    if package == module.partition(".")[0]:
        _follow_imports(sources, sources[package].values())
    for other, files in [(package, sources.pop(package)), *sorted(sources.items())]:
        folder = "" if other == package else f"{other}/"
        for path, file in sorted(files.items(), key=lambda item: item[1]):
            content = file.read_bytes()
            digest.update(f"{folder}{path} {len(content)} ".encode() + content)
    return digest.hexdigest()


def _source_files(spec: ModuleSpec) -> dict[str, Path]:
    """The source files of a package or module, by their paths in its folder."""
    if spec.submodule_search_locations is None:
        file = Path(spec.origin or "")
        return {file.name: file} if spec.has_location else {}
    folders = map(Path, spec.submodule_search_locations)
    return {file.relative_to(folder).as_posix(): file for folder in folders for file in folder.rglob("*.py")}


def _follow_imports(sources: dict[str, dict[str, Path]], files: Iterable[Path]) -> None:
    """Add the source files of the user's own packages and modules that files import, by name, and what those import."""
    for name in sorted({name for file in files for name in _imported_names(file.read_bytes())}):
        spec = None
        with suppress(ImportError, ValueError):  # such as `__main__`
            spec = None if name in sources or name in _NOT_THE_USERS else find_spec(name)
        if spec is not None and not _is_installed(spec):
            sources[name] = _source_files(spec)
            _follow_imports(sources, sources[name].values())


@cache  # a search asks for a digest at each of its plans
def _imported_names(content: bytes) -> frozenset[str]:
    """The packages and top-level modules that a source file imports; none from a file that cannot be parsed."""
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError):
        return frozenset()
    return frozenset(name.partition(".")[0] for node in ast.walk(tree) for name in _names_in(node))


def _names_in(node: ast.AST) -> list[str]:
    """The modules that a statement or call imports."""
    match node:
        case ast.Import(names=names):
            return [alias.name for alias in names]
        case ast.ImportFrom(module=str(module), level=0):
            return [module]
        case ast.Call(
            func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
            args=[ast.Constant(value=str(module)), *_],
        ) if not module.startswith("."):
            return [module]
    return []


def _is_installed(spec: ModuleSpec) -> bool:
    """Whether a package or module is where installed packages are, whose versions are in the receipt or in a lock."""
    locations = [spec.origin] if spec.submodule_search_locations is None else spec.submodule_search_locations
    return any({"site-packages", "dist-packages"} & {*Path(location or "").parts} for location in locations)

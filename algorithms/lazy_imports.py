"""Imports that wait for a first use, of packages that take long to import and of which a process often needs little."""

import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any


class _Later(ModuleType):
    """Stands for a module until a name of it is used."""

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self.__name__), name)


def lazy_module(name: str) -> Any:
    """A module that is imported when a name of it is first used.

    Example:
        >>> lazy_module("json").dumps([1])
        '[1]'
    """
    return _Later(name)


class _OnUse(_Later):
    """Stands for a module in `sys.modules`, too, until a name of it is used."""

    def __getattr__(self, name: str) -> Any:
        # `inspect` and `warnings` look for these in all modules.
        if name in ("__file__", "__warningregistry__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        if sys.modules.get(self.__name__) is self:
            sys.modules.pop(self.__name__, None)
        return super().__getattr__(name)


def import_on_use(name: str) -> None:
    """Let a module be imported when a name of it is first used, whoever imports it before.

    Does nothing for a module that is imported already.
    """
    sys.modules.setdefault(name, _OnUse(name))


class _PartByPart(ModuleType):
    """A package whose `__init__` runs once a name is asked for that is none of its modules."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or self.__spec__ is None or self.__spec__.loader is None:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        if find_spec(f"{self.__name__}.{name}") is not None:
            return import_module(f"{self.__name__}.{name}")
        self.__class__ = ModuleType  # type: ignore[assignment]  # as a package that was imported whole
        self.__spec__.loader.exec_module(self)
        return getattr(self, name)


def import_part_by_part(name: str) -> None:
    """Let each module of a package be imported without the package's `__init__`, which would import them all.

    The package behaves as ever for others in the process: any other name of it runs its `__init__` first. Does nothing
    for a package that is imported already, or is not there.
    """
    spec = None if name in sys.modules else find_spec(name)
    if spec is None or spec.submodule_search_locations is None:
        return
    package = sys.modules[name] = _PartByPart(name, doc=None)
    package.__spec__, package.__loader__, package.__file__ = spec, spec.loader, spec.origin
    package.__path__ = list(spec.submodule_search_locations)
    package.__package__ = name

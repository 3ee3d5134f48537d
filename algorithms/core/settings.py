"""Settings of methods and features: strict dataclasses, found by name in a registry or in the user's own package."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self, TypeVar

from pydantic import JsonValue, PydanticUserError, TypeAdapter

from algorithms.core.optimizers import STRICT
from algorithms.core.unknown_names import check_settings
from algorithms.errors import RefusedError
from algorithms.extension import import_factory, is_own

P = TypeVar("P")


class Strict:
    """The base of settings: unknown keys, and values of another type, are refused."""

    by_coordinate: ClassVar[bool] = False
    __pydantic_config__ = STRICT

    def __new__(cls, *_: Any, **settings: Any) -> Self:
        """Raises UnknownNameError for a setting that does not exist, as `epochs`."""
        check_settings(cls, settings)
        return super().__new__(cls)


_ADAPTERS: dict[object, TypeAdapter[Any]] = {}


def adapter(kind: type[P]) -> TypeAdapter[P]:
    """The (cached) pydantic adapter that reads and writes the dataclass `kind` as JSON values.

    Raises:
        PydanticUserError: For a dataclass with a field of a type that no JSON value has.
    """
    if kind not in _ADAPTERS:
        _ADAPTERS[kind] = TypeAdapter(kind)
    return _ADAPTERS[kind]


def from_registry(
    settings: Mapping[str, JsonValue], shipped: Mapping[str, type[P]], what: str, *, needs: Sequence[str]
) -> P:
    """What `settings` name under "name", with the other keys as its settings.

    Args:
        settings: A name `package.module:factory` is of the user's own: a dataclass of its settings, or a function of
            them.
        shipped: The others by name.
        what: It is, such as "algorithm".
        needs: The functions that the user's own must have.

    Raises:
        RefusedError: For an unknown name, and for the user's own without these functions.
        ValidationError: Pydantic's, for unknown, missing or impossible settings.
    """
    name = str(settings.get("name"))
    kind: Any = import_factory(name, f"the {what}") if is_own(name) else shipped.get(name)
    if kind is None:
        raise RefusedError(
            "there is no {what} {name!r}; choose one of {choices}, or name your own package.module:factory.",
            code="name_unknown",
            what=what,
            name=name,
            choices=", ".join(shipped),
        )
    try:
        reader = adapter(kind)
    except PydanticUserError as error:
        why = str(error).partition("\n")[0]
        raise RefusedError(
            "the {what} {name!r} has settings that no file can give ({why}).",
            code="settings_no_file",
            what=what,
            name=name,
            why=why,
        ) from None
    # By way of JSON, where strict checking still takes a mapping for a nested dataclass.
    options = {key: value for key, value in settings.items() if key != "name"}
    instance: P = reader.validate_json(json.dumps(options))
    missing = [part for part in needs if not callable(getattr(instance, part, None))]
    if missing:
        raise RefusedError(
            "the {what} {name!r} has no {missing}; give it {needs}.",
            code="parts_missing",
            what=what,
            name=name,
            missing=missing[0],
            needs=", ".join(needs),
        )
    return instance

"""Arguments of `fit` that need no record: their types and ranges, the method, and how rows are grouped."""

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from inspect import signature
from numbers import Integral, Real
from types import UnionType
from typing import Any, TypeVar

import numpy as np
import torch
from pydantic import JsonValue, PydanticUserError, ValidationError

from algorithms.core.method import Algorithm
from algorithms.core.settings import adapter
from algorithms.core.unknown_names import check_names, written_settings
from algorithms.errors import RefusedError
from algorithms.methods import CATALOGUE
from algorithms.privacy.accounting import MAX_EPSILON

ROWS = "rows"
"""The name of the term in a ledger that binds how rows are grouped."""
BY_RECORD, BY_PEOPLE, BY_STATEMENT = "each by itself", "by their person", "one for each unit, as stated"

_ARGUMENT_TYPES: Mapping[str, tuple[type | UnionType, str]] = {
    **dict.fromkeys(("epsilon", "delta", "count_noise"), (Real, "a number")),
    **dict.fromkeys(("seed", "memory_mb"), (Integral, "a whole number")),
    **dict.fromkeys(("public", "n_is_public", "one_row_per_unit"), (bool, "True or False")),
    "per_person": (Integral | None, "a whole number"),
    "dataset": (str, "a text"),
    **dict.fromkeys(("unit", "population", "ledger"), (str | None, "a text")),
    "target_scale": (Real | None, "a number"),
}


F = TypeVar("F", bound=Callable[..., Any])


def naming_unknown(call: F) -> F:
    """Refuse arguments that do not exist with the names of those that do."""

    @functools.wraps(call)
    def call_known_arguments(*args: Any, **arguments: Any) -> Any:
        kind = type(arguments.get("method"))
        written = written_settings(kind, f"method={kind.__name__}({{}})") if is_dataclass(kind) else {}
        check_names(arguments, signature(call).parameters, what="fit", kind="argument", written=written)
        return call(*args, **arguments)

    return call_known_arguments  # type: ignore[return-value]


def check_arguments(arguments: Mapping[str, Any]) -> None:
    for name, (kind, words) in _ARGUMENT_TYPES.items():
        if not isinstance(arguments[name], kind):
            raise RefusedError(f"{name} is of type {type(arguments[name]).__name__}; give {words}.")
        if isinstance(text := arguments[name], str) and (not text or text != text.strip()):
            raise RefusedError(f"{name} is {text!r}; give a text without spaces around it, or leave it out.")
    if arguments["noise"] not in ("secure", "seeded"):
        raise RefusedError(f'noise is {arguments["noise"]!r}; choose "secure" or "seeded".')
    if arguments["noise"] == "seeded" and not arguments["public"]:
        raise RefusedError(
            'seeded noise protects nobody, and the records are private; set noise to "secure".'
        )
    if not 0 < arguments["epsilon"] <= MAX_EPSILON:
        raise RefusedError(
            f"epsilon is {arguments['epsilon']:g}; give a number above 0, such as 1, and at most {MAX_EPSILON:g}."
        )
    if arguments["memory_mb"] < 1:
        raise RefusedError(f"memory_mb is {arguments['memory_mb']}; give at least 1.")
    if arguments["on_step"] is not None and not callable(arguments["on_step"]):
        raise RefusedError("on_step is no function; give one that takes a Step, or None.")
    if torch.get_default_device().type != "cpu":
        raise RefusedError(
            f"PyTorch's default device is {torch.get_default_device()}; set it to cpu by torch.set_default_device, and"
            " choose where to train by device."
        )


def grouping_of(people: Any, unit: str | None, *, one_row_per_unit: bool) -> tuple[str, str]:
    """How rows become what is protected, and its unit.

    Raises RefusedError for people beside one_row_per_unit, and for a unit of its own without either.
    """
    if people is not None:
        if one_row_per_unit:
            raise RefusedError(
                "people and one_row_per_unit were both given, and people says whose each row is; leave one out."
            )
        return BY_PEOPLE, unit or "one person"
    if one_row_per_unit:
        return BY_STATEMENT, unit or "one person"
    if unit not in (None, "one record"):
        raise RefusedError(
            f"unit is {unit!r}, and nothing says that nobody has several rows; give people, the person of each row,"
            " with per_person, or state by one_row_per_unit=True that each row is one unit; the card shows that it is"
            " your statement."
        )
    return BY_RECORD, "one record"


def describe_method(method: Algorithm[Any]) -> tuple[Algorithm[Any], str, dict[str, JsonValue]]:
    """A method with numbers of Python, its name, and its settings as JSON values.

    Raises RefusedError for what is no method, and for settings that are out of range or cannot be stated on a card.
    """
    if isinstance(method, type) or not all(
        hasattr(method, name) for name in ("plan", "init", "step", "released")
    ):
        raise RefusedError(
            f"the method is {method!r}; give the settings of one, such as DPSGD(steps=300, expected_batch_size=256)."
        )
    kind = type(method)
    names = {of: name for name, of in CATALOGUE.items()}
    # Settings built in Python were not validated yet; those of params.yaml are.
    try:
        reader = adapter(kind)
        settings = reader.dump_python(method, mode="json", warnings=False, fallback=_plain)
        method = reader.validate_json(json.dumps(settings))
    except PydanticUserError:
        raise RefusedError(
            f"the settings of {kind.__name__} cannot be stated on a card; make it a dataclass of numbers and texts."
        ) from None
    except ValidationError as error:
        key, what = ".".join(map(str, error.errors()[0]["loc"])), error.errors()[0]["msg"]
        raise RefusedError(f"the setting {key} of {kind.__name__} does not fit: {what}; change it.") from None
    return method, names.get(kind, f"{kind.__module__}:{kind.__qualname__}"), settings


def _plain(value: Any) -> Any:
    """A number of NumPy as one of Python, and anything else in words."""
    return value.item() if isinstance(value, np.generic) else str(value)

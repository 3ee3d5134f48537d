"""YAML as people write it: params, data cards, presets."""

from datetime import date
from functools import lru_cache
from typing import Any, Literal, TypeAlias

from pydantic_core import PydanticCustomError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

_MAX_BITS = 1000
_MAX_REMEMBERED = 32
"""How many texts are remembered with their documents."""

Document: TypeAlias = dict[str, Any]
"""What people wrote in a YAML or JSON file, or what is written there for them, before anything has checked it."""


DocumentFault: TypeAlias = Literal["bad_value", "large_number", "not_of_json", "not_yaml", "too_deep"]
CONTRADICTION = "contradiction"
"""The type of a pydantic error that `contradiction` makes."""


def contradiction(sentence: str, *keys: str) -> PydanticCustomError:
    """What a validator raises where keys of its document cannot have their values, together or at all.

    keys: their paths below what is validated, for callers that say which keys to change; the sentence is for people.
    """
    return PydanticCustomError(CONTRADICTION, "{sentence}", {"sentence": sentence, "keys": keys})


class DocumentError(ValueError):
    """A text that is no YAML, or more than JSON has; the message continues a sentence that begins with the file's name.

    code: the kind of what is wrong, for callers and tests.
    """

    def __init__(self, clause: str, *, code: DocumentFault) -> None:
        super().__init__(clause)
        self.code = code


def load_yaml(text: str) -> Any:
    """The document in a YAML text, of what JSON has, too: a date is its text; raises DocumentError.

    Example:
        >>> load_yaml("a: &x [1, 2]\\nb: *x")
        {'a': [1, 2], 'b': [1, 2]}
    """
    return _plain(_parse(text))  # a copy, which the caller may change


@lru_cache(maxsize=_MAX_REMEMBERED)
def _parse(text: str) -> Any:
    """The document, parsed once: a command reads the same params.yaml and data card several times."""
    try:
        return _plain(YAML(typ="safe", pure=True).load(text))
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" near line {mark.line + 1}" if mark else ""
        problem = str(getattr(error, "problem", None) or "unreadable").splitlines()[0]
        raise DocumentError(f"is not valid YAML{where}: {problem}", code="not_yaml") from None
    except DocumentError:
        raise
    except RecursionError:
        raise DocumentError("is nested too deeply, or within itself", code="too_deep") from None
    except (ValueError, TypeError, AttributeError):
        # Of a date or a number that is none, whose text is not shown.
        raise DocumentError("has a date, a number or another value that is none", code="bad_value") from None


def _plain(value: Any) -> Any:
    """A value with texts in place of dates; raises DocumentError for what JSON has not, and for endless numbers."""
    if isinstance(value, dict):
        if any(isinstance(key, tuple) for key in value):
            raise DocumentError("has a list or a mapping as a key", code="not_of_json")
        return {_plain(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_plain(part) for part in value]
    if isinstance(value, date):
        return str(value)
    if not isinstance(value, str | int | float | None):
        raise DocumentError("has a value that is no text, number, list or mapping", code="not_of_json")
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        raise DocumentError(f"has a number of more than {_MAX_BITS} bits", code="large_number")
    return value

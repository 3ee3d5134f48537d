"""YAML as people write it: params, data cards, presets. What could not be read in bounded time and depth is refused."""

from datetime import date
from functools import lru_cache
from typing import Any, Literal, TypeAlias

from pydantic_core import PydanticCustomError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import Node

_MAX_CHARACTERS, _MAX_VALUES, _DEEPEST, _MAX_BITS = 8 * 2**20, 1_000_000, 50, 1000
_MAX_REMEMBERED = 32
"""How many texts are remembered with their documents."""

Document: TypeAlias = dict[str, Any]
"""What people wrote in a YAML or JSON file, or what is written there for them, before anything has checked it."""


DocumentFault: TypeAlias = Literal[
    "bad_value", "circular", "large_number", "long_text", "many_values", "not_of_json", "not_yaml", "too_deep"
]
CONTRADICTION = "contradiction"
"""The type of a pydantic error that `contradiction` makes."""


def contradiction(sentence: str, *keys: str) -> PydanticCustomError:
    """What a validator raises where keys of its document cannot have their values, together or at all.

    keys: their paths below what is validated, for callers that say which keys to change; the sentence is for people.
    """
    return PydanticCustomError(CONTRADICTION, "{sentence}", {"sentence": sentence, "keys": keys})


class DocumentError(ValueError):
    """A text that is no YAML, or too much of it; the message continues a sentence that begins with the file's name.

    code: the kind of what is wrong, for callers and tests.
    """

    def __init__(self, clause: str, *, code: DocumentFault) -> None:
        super().__init__(clause)
        self.code = code


def load_yaml(text: str) -> Any:
    """The document in a YAML text, of what JSON has, too: a date is its text; raises DocumentError.

    The nodes are counted before values are made of them: an alias repeats a node for nothing, but ten aliases of ten
    aliases, and so on, would be written or merged without end.

    Example:
        >>> load_yaml("a: &x [1, 2]\\nb: *x")
        {'a': [1, 2], 'b': [1, 2]}
    """
    if len(text) > _MAX_CHARACTERS:
        raise DocumentError(f"is longer than {_MAX_CHARACTERS:,} characters", code="long_text")
    return _plain(_parse(text))  # a copy, which the caller may change


@lru_cache(maxsize=_MAX_REMEMBERED)
def _parse(text: str) -> Any:
    """The document, parsed once: a command reads the same params.yaml and data card several times."""
    try:
        yaml = YAML(typ="safe", pure=True)
        node = yaml.compose(text)
        if node is None:
            return None
        _extent(node, {})
        return _plain(yaml.constructor.construct_document(node))
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" near line {mark.line + 1}" if mark else ""
        problem = str(getattr(error, "problem", None) or "unreadable").splitlines()[0]
        raise DocumentError(f"is not valid YAML{where}: {problem}", code="not_yaml") from None
    except DocumentError:
        raise
    except RecursionError:
        raise DocumentError(f"is nested deeper than {_DEEPEST} levels", code="too_deep") from None
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


def _extent(node: Node, extents: dict[int, tuple[int, int] | None]) -> tuple[int, int]:
    """How many values a node has with its aliases written out, and how deep they are; each node is visited once."""
    if id(node) in extents:
        extent = extents[id(node)]
        if extent is None:
            raise DocumentError("has an alias of a part within that part", code="circular")
        return extent
    extents[id(node)] = None
    value, count, depth = node.value, 1, 0
    for part in value if isinstance(value, list) else ():
        for child in part if isinstance(part, tuple) else (part,):
            more, below = _extent(child, extents)
            count, depth = count + more, max(depth, below)
    if count > _MAX_VALUES:
        raise DocumentError(
            f"has more than {_MAX_VALUES:,} values, its aliases written out", code="many_values"
        )
    if depth >= _DEEPEST:
        raise DocumentError(f"is nested deeper than {_DEEPEST} levels", code="too_deep")
    extents[id(node)] = count, depth + 1
    return count, depth + 1

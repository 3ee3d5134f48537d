"""The available data sets: one card per set, a YAML file with the set's name in `cards`."""

import json
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from data.schema.card import DataCard
from data.schema.errors import DataRefusedError

CARDS = Path(__file__).parents[1] / "cards"


def names(folder: Path = CARDS) -> tuple[str, ...]:
    """Names of the data sets that have a card in `folder`, sorted."""
    return tuple(sorted(path.stem for path in folder.glob("*.yaml")))


def card(name: str, folder: Path = CARDS) -> DataCard:
    """Load the card of the data set `name`.

    Raises DataRefusedError if there is no such card, or if it is invalid; the message then has the path of the faulty
    key.
    """
    if name not in names(folder):
        known = ", ".join(names(folder))
        way = f"choose one of: {known}, or add a card to" if known else "add its card, the first one, to"
        raise DataRefusedError(f"there is no data set {name!r}; {way} {folder}.")
    path = folder / f"{name}.yaml"
    document = _document(path)
    try:
        declared = DataCard.model_validate_json(json.dumps(document))
    except ValidationError as error:
        raise DataRefusedError(_sentence(path, document, error)) from None
    if declared.name != name:
        raise DataRefusedError(
            f"data card {path}, key name: must be {name!r}, the name of the file; correct it."
        )
    return declared


def _document(path: Path) -> dict[str, Any]:
    try:
        document = YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))
        json.dumps(document)
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" near line {mark.line + 1}" if mark else ""
        problem = str(getattr(error, "problem", None) or "unreadable").splitlines()[0]
        raise DataRefusedError(f"data card {path} is not valid YAML{where}: {problem}; correct it.") from None
    except (TypeError, UnicodeDecodeError):
        raise DataRefusedError(
            f"data card {path} must hold plain UTF-8 text, numbers and lists; correct it."
        ) from None
    if not isinstance(document, dict):
        raise DataRefusedError(f"data card {path} must be a mapping of keys to values; correct it.")
    return document


def _sentence(path: Path, document: object, error: ValidationError) -> str:
    first, *others = error.errors()
    unknown = [str(other["loc"][-1]) for other in others if other["type"] == "extra_forbidden"]
    meant = get_close_matches(str(first["loc"][-1]), unknown, 1) if first["type"] == "missing" else []
    if meant:
        return f"data card {path}, key {meant[0]}: unknown key; {first['loc'][-1]} is its name, correct the card."
    message = {"extra_forbidden": "unknown key", "missing": "is missing"}.get(first["type"], first["msg"])
    key = _key(document, first["loc"], is_missing=first["type"] == "missing")
    where = f", key {key}" if key else ""
    return f"data card {path}{where}: {message.removeprefix('Value error, ')}; correct the card."


def _key(document: Any, location: tuple[int | str, ...], *, is_missing: bool) -> str:
    """The path of a key as in the document, without pydantic's tags of unions."""
    parts: list[str] = []
    for position, part in enumerate(location):
        keys = range(len(document)) if isinstance(document, list) else document
        inside = isinstance(document, dict | list) and part in keys
        if inside or (is_missing and position == len(location) - 1):
            parts.append(str(part))
        if inside:
            document = document[part]
    return ".".join(parts)

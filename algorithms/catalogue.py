"""The algorithms by name."""

import json
from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter

from algorithms.algorithm import Algorithm
from algorithms.dp_sgd import DPSGD
from algorithms.non_private import NonPrivate
from algorithms.privacy.errors import Refused

CATALOGUE: dict[str, type[Algorithm[Any]]] = {"dp_sgd": DPSGD, "non_private": NonPrivate}


def from_settings(settings: Mapping[str, Any]) -> Algorithm[Any]:
    """The algorithm that `settings` name under "name", with the other keys as its settings.

    Raises Refused for an unknown name and pydantic's ValidationError for unknown, missing or impossible settings.
    """
    name = settings.get("name")
    if not isinstance(name, str) or name not in CATALOGUE:
        raise Refused(f"there is no algorithm {name!r}; choose one of {', '.join(CATALOGUE)}.")
    own = {key: value for key, value in settings.items() if key != "name"}
    # By way of JSON, where strict checking still takes a mapping for a nested dataclass.
    return TypeAdapter(CATALOGUE[name]).validate_json(json.dumps(own))

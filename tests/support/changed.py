"""Documents that differ from another in one place."""

import copy
from collections.abc import Sequence
from functools import reduce
from operator import getitem
from typing import Any


def changed(document: Any, place: str | Sequence[str | int], value: object) -> Any:
    """A copy with another value at a place, as `events.1.count`: the value, or what a function makes of the old one.

    The index after the last of a list adds to it.
    """
    keys = (
        [int(key) if key.isdecimal() else key for key in place.split(".")]
        if isinstance(place, str)
        else place
    )
    document = copy.deepcopy(document)
    holder: Any = reduce(getitem, keys[:-1], document)
    if isinstance(holder, list) and keys[-1] == len(holder):
        holder.append(value)
    else:
        holder[keys[-1]] = value(holder[keys[-1]]) if callable(value) else value
    return document

"""Which run is asked for: one digest of all that decides its result, by which it is known when it is asked for again.

What a data card says of its records in words, and the cap, decide no result: a corrected title asks for the same run.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data import PublicDescription
from data.owner import PUBLIC_KEY, keyed, owner_key
from data.prepared import contents, salt_of
from tasks.runs import is_known

_WORDS = ("title", "source", "licence", "cap_epsilon", "cap_delta")


def digest(
    checkout: Path, decides: Sequence[object], public: PublicDescription, prepared: Path, *, home: Path
) -> str:
    """The digest of a run; secret for private records, since only the owner key makes it.

    decides: plan and settings. prepared: the folder with the records, of which it covers those to train on. home: where
    the key is. A run that is known there by the digest of older software, or whose records were prepared by it, keeps
    that one.
    """
    older, found = _by_salt(checkout, decides, public, prepared), contents(prepared)
    if found is None or is_known(home, older):
        return older
    described = {name: value for name, value in _described(public).items() if name not in _WORDS}
    every = [str(checkout.resolve()), *decides, described, found]
    key = PUBLIC_KEY if public.public else owner_key(home)
    return keyed(key, ["inputs of a run", json.dumps(every, sort_keys=True)]).hex()


def _by_salt(checkout: Path, decides: Sequence[object], public: PublicDescription, prepared: Path) -> str:
    """The digest of older software, with every word of the data card: its salt covers the whole card."""
    plan, *settings = decides
    every = [str(checkout.resolve()), plan, _described(public), *settings]
    return hashlib.sha256(salt_of(prepared) + json.dumps(every, sort_keys=True).encode()).hexdigest()


def _described(public: PublicDescription) -> dict[str, Any]:
    """The description as it is written, in which what a card does not declare can be left out."""
    document: dict[str, Any] = json.loads(public.to_json())
    return document

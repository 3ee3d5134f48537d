"""Which run is asked for: one digest of all that decides its result, by which it is known when it is asked for again.

What a data card says of its records in words, and the cap, decide no result: a corrected title asks for the same run.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from data import PublicDescription
from data.prepare.prepared import contents
from data.prepare.secret_key import PUBLIC_KEY, keyed, owner_key

_WORDS = ("title", "source", "licence", "cap_epsilon", "cap_delta")


def digest(
    checkout: Path, decides: Sequence[object], public: PublicDescription, prepared: Path, *, home: Path
) -> str:
    """The digest of a run; secret for private records, since only the owner key makes it.

    decides: plan and settings. prepared: the folder with the records, of which it covers those to train on. home: where
    the key is.
    """
    described = {name: value for name, value in json.loads(public.to_json()).items() if name not in _WORDS}
    every = [str(checkout.resolve()), *decides, described, contents(prepared)]
    key = PUBLIC_KEY if public.public else owner_key(home)
    return keyed(key, ["inputs of a run", json.dumps(every, sort_keys=True)]).hex()

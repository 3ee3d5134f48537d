"""By which digest a run is known again, also one that older software did."""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tasks import inputs
from tasks.runs import DONE
from tests.synthetic_run import description

DECIDES: list[Any] = [{"steps": 3}, {"name": "softmax"}, "secret", []]


def of_older_software(checkout: Path) -> str:
    """With the fields that descriptions had before there was a checksum of words, and the salt."""
    described = {name: value for name, value in asdict(description()).items() if name != "words_sha256"}
    plan, *settings = DECIDES
    text = json.dumps([str(checkout.resolve()), plan, described, *settings], sort_keys=True)
    return hashlib.sha256(b"s" * 32 + text.encode()).hexdigest()


def test_a_run_of_older_software_is_known_again(tmp_path: Path) -> None:
    home, prepared = tmp_path / "home", tmp_path / "prepared"
    prepared.mkdir()
    (prepared / "salt").write_bytes(b"s" * 40)

    def digest() -> str:
        return inputs.digest(tmp_path, DECIDES, description(), prepared, home=home)

    assert digest() == of_older_software(tmp_path)
    (prepared / "contents").write_text("of the records\n")
    assert digest() != of_older_software(tmp_path)
    (home / DONE).mkdir(parents=True)
    (home / DONE / of_older_software(tmp_path)).write_text("20261101T000000-abcdef01\n")
    assert digest() == of_older_software(tmp_path)

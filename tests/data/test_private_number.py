"""What reading refuses does not say how many records there are, where the card holds that private."""

import logging
import re
import traceback
from pathlib import Path

import pytest

from data import DataRefusedError
from data.reading import read
from tests.data.conftest import CardOf, Document
from tests.support.parts import whole

PRIVATE, CLASS = 317, 211
"""A number of rows, and one of rows of a class, that occur nowhere else."""
GOOD = [f"{place % 90},Rome,{'yes' if place < CLASS else 'no'}" for place in range(PRIVATE)]
HEADER = "age,town,answer"

_NUMBERS = "|".join(str(of + more) for of in (PRIVATE, CLASS, PRIVATE - CLASS) for more in (-1, 0, 1))
TOLD = re.compile(rf"(?<![\d.])(?:{_NUMBERS})(?![\d])")

FILES: dict[str, tuple[bytes, Document]] = {
    "more than the bound": ("\n".join([HEADER, *GOOD]).encode(), {"records": {"at_most": 99}}),
    "another number of fields in the last row": ("\n".join([HEADER, *GOOD, "1,Rome"]).encode(), {}),
    "no field": ("\n".join([HEADER, *GOOD, ",,,,"]).encode(), {}),
    "a missing number": ("\n".join([HEADER, *GOOD, ",Rome,yes"]).encode(), {}),
    "a number in words": ("\n".join([HEADER, *GOOD, "many,Rome,yes"]).encode(), {}),
    "an unknown class": ("\n".join([HEADER, *GOOD, "1,Rome,perhaps"]).encode(), {}),
    "classes of other names": ("\n".join([HEADER, *GOOD]).encode(), {"classes": ["0", "1"]}),
    "a line break in quotes": ("\n".join([HEADER, *GOOD, '"1\n",Rome,yes']).encode(), {}),
    "an open quote": ("\n".join([HEADER, *GOOD, '"1,Rome,yes']).encode(), {}),
    "another encoding": ("\n".join([HEADER, *GOOD]).encode() + b"\n1,R\xf6m,yes", {}),
    "other columns": ("\n".join(["a,b,c", *GOOD]).encode(), {}),
    "semicolons": ("\n".join([HEADER, *GOOD]).replace(",", ";").encode(), {}),
    "no rows": (HEADER.encode(), {}),
    "no table": (b"\x00\x01", {}),
    "all held out": ("\n".join([HEADER, *GOOD]).encode(), {"split": {"salt": "s", "test_fraction": 1e-9}}),
}


def test_a_number_is_found_where_it_is_said() -> None:
    assert TOLD.search(f"there are {PRIVATE} records.") and not TOLD.search("at most 1000, 0.317")


@pytest.mark.parametrize("name", FILES)
def test_no_refusal_log_or_traceback_says_a_private_number(
    name: str, table: Document, card_of: CardOf, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    content, changes = FILES[name]
    (tmp_path / "t.csv").write_bytes(content)
    own = card_of(table | changes)
    with caplog.at_level(logging.DEBUG), pytest.raises(DataRefusedError) as refusal:
        whole(read(own, {"train": tmp_path / "t.csv"}))
    told = "".join(traceback.format_exception(refusal.value)) + caplog.text
    assert not TOLD.search(re.sub(r"line \d+, in", "", told.replace(str(tmp_path), "")))

"""The split rule: each record decides for itself."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from data.card import Split
from data.readers.records import Block, Records
from data.reading import is_test, split
from tests.support.parts import whole

RULE = Split(salt="a public salt", test_fraction=0.5)
ROWS = st.lists(
    st.tuples(st.sampled_from([-0.0, 0.0, 0.25, 1.0]), st.integers(0, 2)), min_size=1, max_size=30
)


def records(rows: list[tuple[float, int]]) -> Records:
    """Records of one feature and one label each."""
    return Records(np.array([[x] for x, _ in rows], np.float32), np.array([y for _, y in rows], np.int64))


@given(rows=ROWS, data=st.data())
def test_removing_a_record_moves_no_other(rows: list[tuple[float, int]], data: st.DataObject) -> None:
    gone = data.draw(st.integers(0, len(rows) - 1))
    before = is_test(records(rows), RULE)
    after = is_test(records(rows[:gone] + rows[gone + 1 :]), RULE) if len(rows) > 1 else np.array([], bool)
    assert np.delete(before, gone).tolist() == after.tolist()


@given(rows=ROWS)
def test_equal_records_stay_together_and_none_is_lost(rows: list[tuple[float, int]]) -> None:
    sides: dict[tuple[float, int], set[bool]] = {}
    for row, side in zip(rows, is_test(records(rows), RULE), strict=True):
        sides.setdefault(row, set()).add(bool(side))
    assert all(len(side) == 1 for side in sides.values())
    parts = whole(split([Block("train", records(rows))], RULE))
    assert len(parts.train) + len(parts.test) == len(rows)
    kept = [float(x) for part in (parts.train, parts.test) for x in part.features[:, 0]]
    assert sorted(kept) == sorted(x for x, _ in rows)


def test_the_sides_are_the_ones_published() -> None:
    """A change of the rule would move private records between training and test unnoticed."""
    rows = records([(x / 8, x % 3) for x in range(16)])
    sides = "".join("x" if side else "." for side in is_test(rows, RULE))
    assert sides == "xxxx.x.x..xx...."


def test_label_feature_and_salt_each_count() -> None:
    rows = records([(x / 1000, 0) for x in range(1000)])
    other_label = Records(rows.features, rows.labels + 1)
    other_salt = Split(salt="another", test_fraction=0.5)
    sides = is_test(rows, RULE)
    assert 400 < (sides != is_test(other_label, RULE)).sum() < 600  # 6 standard deviations: 1 in 10^9
    assert 400 < (sides != is_test(rows, other_salt)).sum() < 600
    assert 400 < sides.sum() < 600


def test_the_share_of_test_records_is_the_declared_one() -> None:
    """Five standard deviations: a false alarm in 10^6."""
    n, share = 40_000, 0.2
    rows = records([(x / n, 0) for x in range(n)])
    found = is_test(rows, Split(salt="s", test_fraction=share)).mean()
    assert abs(found - share) < 5 * (share * (1 - share) / n) ** 0.5


def test_many_records_are_hashed_as_few_are() -> None:
    rows = [(x / 40_000, 0) for x in range(40_000)]  # more than two blocks of hashes
    apart = [records(rows[start : start + 7_000]) for start in range(0, len(rows), 7_000)]
    sides = is_test(records(rows), RULE)
    assert np.concatenate([is_test(block, RULE) for block in apart]).tolist() == sides.tolist()
    parts = whole(split([Block("train", block) for block in apart], RULE))
    assert parts.test.features.tobytes() == records(rows)[sides].features.tobytes()
    assert parts.train.features.tobytes() == records(rows)[~sides].features.tobytes()

"""Large arrays are in a mapped file, and small ones in memory."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from algorithms.errors import RefusedError
from algorithms.models import mapped_arrays
from algorithms.models.mapped_arrays import as_type, is_finite, is_mapped, new_array, take_rows


@pytest.fixture(autouse=True)
def _from_a_kilobyte(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(mapped_arrays, "MAX_IN_MEMORY", 1000)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def test_the_file_of_a_large_array_has_no_name_and_its_room_is_reserved(tmp_path: Path) -> None:
    assert not is_mapped(new_array((125,), np.float64))
    array = new_array((126,), np.float64)
    assert is_mapped(array)
    assert not list(tmp_path.iterdir())
    array[:] = 7.0
    assert array.sum() == 7 * 126


def test_a_disk_without_room_is_refused_before_a_record_is_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    with pytest.raises(RefusedError, match=rf"{tmp_path} has no room .* set TMPDIR to a folder"):
        new_array((1000,), np.float64)


def test_a_mapped_array_stays_mapped_and_gives_what_one_in_memory_gives() -> None:
    plain = np.random.default_rng(0).normal(size=(400, 3))
    mapped = new_array(plain.shape, plain.dtype)
    mapped[:] = plain
    index = np.array([[3, 399], [0, 3]] * 50)
    for done in (
        lambda of: as_type(of, np.float32),
        lambda of: as_type(of[:, 1], np.float64),
        lambda of: take_rows(of, index),
    ):
        expected, array = done(plain), done(mapped)
        assert is_mapped(array) and not is_mapped(expected)
        assert array.flags.c_contiguous and array.dtype == expected.dtype
        np.testing.assert_array_equal(array, expected)
    assert as_type(mapped, np.float64) is mapped


def test_one_number_that_is_not_finite_is_noticed_wherever_it_is() -> None:
    array = np.zeros((3, 2**18))  # in three chunks
    assert is_finite(array)
    for row in range(3):
        array[row, -1] = np.inf
        assert not is_finite(array)
        array[row, -1] = 0.0

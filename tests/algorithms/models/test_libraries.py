"""What a person is told where torchvision and torch come from different builds: the same words everywhere."""

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from algorithms.fit_model import model_of
from algorithms.fit_records import records_of
from algorithms.models import libraries
from algorithms.models.libraries import LibraryMissingError, imported_library, torchvision_problem

WORDS = "torchvision was built for another torch than "


@pytest.fixture
def other_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A torchvision that does not load, and a timm that needs it."""
    for name in ("torchvision", "timm"):
        (tmp_path / f"{name}.py").write_text(
            "raise RuntimeError('operator torchvision::nms does not exist')\n"
        )
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(libraries, "_declare_torchvision", lambda: None)
    libraries._warn_of_torchvision.cache_clear()
    yield tmp_path
    libraries._warn_of_torchvision.cache_clear()


@pytest.mark.usefixtures("other_build")
def test_a_library_that_needs_the_other_build_is_refused_in_the_words_of_the_doctor(
    caplog: pytest.LogCaptureFixture,
) -> None:
    words = torchvision_problem()
    assert words is not None and words.startswith(WORDS) and "install both from the same index" in words
    with pytest.raises(LibraryMissingError) as refusal:
        imported_library("timm")
    assert str(refusal.value) == words
    assert caplog.messages == [words]


@pytest.mark.usefixtures("other_build")
def test_fit_says_so_for_a_module_of_such_a_library_and_for_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    X, y = torch.zeros(4, 3), torch.zeros(4, dtype=torch.long)

    class Net(nn.Linear):
        pass

    model_of(Net(3, 2), "cross_entropy", records_of(Net(3, 2), X, y, "cross_entropy"))
    assert caplog.messages == []
    Net.__module__ = "transformers.models.made_up"
    model_of(Net(3, 2), "cross_entropy", records_of(Net(3, 2), X, y, "cross_entropy"))
    assert caplog.messages == [torchvision_problem()]

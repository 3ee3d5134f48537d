"""What takes longest in plans and reports, and is the same from test to test, is done once or not at all."""

import os
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import pytest

from algorithms.gradients import engine
from algorithms.gradients.model_inspection import InspectionLimits
from algorithms.privacy.accounting.risk import Profile, risk_profile
from algorithms.privacy.documents import PlanDocument, RunIdentity
from algorithms.privacy.ledger import database
from data import DatasetInfo
from tasks import report, reporting
from tasks.preflight import rehearsal
from tasks.reporting import figures
from tests.support.costs import computed_once
from tests.support.engines import engines_made_once
from tests.support.onnx_exports import exports_share_translations

_PROFILES: dict[str, Profile] = {}
_MADE = defaultdict[str, set[tuple[str, str]]](set)
"""By module of tests, name and words, without numbers, of the figures that were made."""
_REHEARSED = defaultdict[str, set[str]](set)
"""By module of tests, plans and data sets, without numbers, of the runs that were rehearsed."""
_TEMPLATES = cache(reporting.environment)
_PRAGMAS = [database.SQLITE_PRAGMAS[0], "PRAGMA synchronous = OFF"]
"""Without a log beside the file (WAL), which is made and deleted again for each transaction of a process alone."""


def _once(*asked: Any) -> Profile:
    key = repr(asked)
    if key not in _PROFILES:
        _PROFILES[key] = risk_profile(*asked)
    return _PROFILES[key]


def _undrawn(_draw: figures.Drawing, words: str) -> figures.Picture:
    """In the place of a rehearsal: the report makes the same figures."""
    return figures.Picture(b"undrawn", b"", words)


def _made_once(made: set[tuple[str, str]], draw: figures.Drawing, words: str) -> figures.Picture:
    """Each kind of figure is made once, and then one of those that were made."""
    kind = (draw.__qualname__, re.sub(r"[\d.]+", "", words))
    if kind in made:
        return _undrawn(draw, words)
    picture = REHEARSE_PICTURE(draw, words)
    made.add(kind)
    return picture


REHEARSE, REHEARSE_PICTURE = rehearsal.rehearse, figures.rehearse_picture


def _rehearse_once(
    rehearsed: set[str], document: PlanDocument, info: DatasetInfo, known: RunIdentity, **rest: Any
) -> None:
    """A run is rehearsed unless one was whose plan and data set differ from it in numbers alone."""
    kind = re.sub(r"\b[0-9a-f]{16,}\b|\d[\d.e+-]*", "", f"{document.to_text()} {info.to_json()}")
    if kind not in rehearsed:
        REHEARSE(document, info, known, **rest)
        rehearsed.add(kind)


@pytest.fixture
def every_rehearsal(quick_work: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of what a rehearsal refuses."""
    monkeypatch.setattr(rehearsal, "rehearse", REHEARSE)


@pytest.fixture
def rehearsed_figures(
    every_rehearsal: None, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """A rehearsal makes its figures, as where classes have unusual names; each kind once a module."""
    monkeypatch.setattr(rehearsal, "has_usual_figures", lambda _info: False)
    made = _MADE[f"rehearsals of {request.module.__name__}"]
    monkeypatch.setattr(figures, "rehearse_picture", partial(_made_once, made))


@pytest.fixture(autouse=True)
def quick_work(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    """Each kind of figure is made once a module, in one theme, and drawn to a few bytes.

    Cost, noise and risk of equal releases are computed once.
    Runs that differ in numbers alone are rehearsed once a module.

    The page's template is compiled once, and equal models are inspected once, as briefly as large ones.
    Exports to ONNX share what PyTorch makes for each.
    Nothing waits for the disk, which matters where the power fails alone.
    Fixtures of whole modules are made before it: what they leave has figures to look at.
    """
    with computed_once(), engines_made_once(), exports_share_translations():
        monkeypatch.setattr(engine, "InspectionLimits", partial(InspectionLimits, full_operations=0))
        monkeypatch.setattr(figures, "png", lambda _figure: b"undrawn")
        monkeypatch.setattr(report, "risk_profile", _once)
        monkeypatch.setattr(report, "picture", partial(_made_once, _MADE[request.module.__name__]))
        monkeypatch.setattr(figures, "rehearse_picture", _undrawn)
        once = partial(_rehearse_once, _REHEARSED[request.module.__name__])
        monkeypatch.setattr(rehearsal, "rehearse", once)
        monkeypatch.setattr(reporting, "environment", _TEMPLATES)
        monkeypatch.setattr(database, "SQLITE_PRAGMAS", _PRAGMAS)
        monkeypatch.setattr(os, "fsync", lambda _file: None)
        yield

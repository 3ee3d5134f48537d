"""Presets: each is a params.yaml that can be planned as it stands."""

from pathlib import Path

import pytest

from data.schema import registry
from tasks.calibrate import plan_for
from tasks.config import params
from tasks.runs.encoders import public_of
from tests.support.checkout import PROJECT

PRESETS = sorted((PROJECT / "presets").glob("*.yaml"))


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_a_preset_can_be_planned_for_its_data_set(path: Path) -> None:
    settings = params.load(path, reads=params.GROUPS)
    public = public_of(registry.card(settings.data.dataset), settings.data)
    plan = plan_for(settings, public)
    assert 0.99 * settings.privacy.epsilon < plan.cost.epsilon <= settings.privacy.epsilon
    assert bool(plan.target.prior_events) == (settings.features is not None)


def test_there_is_a_preset() -> None:
    assert PRESETS

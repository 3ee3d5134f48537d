"""Presets: each is a params.yaml that can be planned as it stands."""

from pathlib import Path

import pytest

from flows.cli.costs import cost_table
from tasks.config import params
from tasks.runs.preflight import outlook
from tests.support.checkout import PROJECT

PRESETS = sorted((PROJECT / "presets").glob("*.yaml"))


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_a_preset_can_be_planned_for_its_data_set(path: Path) -> None:
    settings = params.load(path, reads=params.GROUPS)
    found = outlook(PROJECT, settings)
    plan = found.plan
    assert cost_table(found, settings).row_count > 5
    assert 0.99 * settings.privacy.epsilon < plan.cost.epsilon <= settings.privacy.epsilon
    assert bool(plan.target.prior_events) == (settings.features is not None)


def test_there_is_a_preset() -> None:
    assert PRESETS

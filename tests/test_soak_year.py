"""What the year of retrainings checks of the ledger's rows, by dp_accounting alone."""

from pathlib import Path

import pytest
from dp_accounting import GaussianDpEvent
from dp_accounting.rdp import RdpAccountant

from algorithms.privacy.accounting import Budget
from algorithms.privacy.accounting.events import on_disjoint_parts, schedule_to_json
from algorithms.privacy.ledger import Composition, Ledger
from tests.soak.year_check import recomputed

DELTA, ORDER = 1e-5, 8.0


def test_people_trained_on_and_people_held_out_lose_what_is_released_of_them(tmp_path: Path) -> None:
    ledger = Ledger.open(f"sqlite:///{tmp_path}/ledger.sqlite")
    ledger.declare("p", Budget(9.0, DELTA), public=False, composition=Composition("renyi", ORDER))
    events = schedule_to_json(on_disjoint_parts([(GaussianDpEvent(8.0), 3)], [(GaussianDpEvent(5.0), 1)]))
    for run in ("a", "b"):
        ledger.reserve(run, "p", Budget(1.0, DELTA), events=events, notes={})
        ledger.settle(run, Budget(1.0, DELTA), events=events)
    ((block,),) = [recomputed(ledger, "p", order=ORDER, delta=DELTA)]
    sides = []
    for noise, count in ((8.0, 6), (5.0, 2)):
        accountant = RdpAccountant([ORDER])
        sides.append(accountant.compose(GaussianDpEvent(noise), count).get_epsilon(DELTA))
    assert sides[0] > sides[1]
    assert [block["trained_on"], block["held_out"]] == pytest.approx(sides, rel=1e-12)
    assert block["at_order"] == pytest.approx(block["ledger"], rel=1e-9) == pytest.approx(sides[0])
    assert block["any_order"] <= block["at_order"]

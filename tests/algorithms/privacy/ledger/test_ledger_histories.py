"""Random histories under zCDP and Rényi: no person is ever above the cap, and no block pays for another."""

from itertools import combinations
from tempfile import TemporaryDirectory
from typing import Any

import dp_accounting as dp
from hypothesis import given, settings
from hypothesis import strategies as st

from algorithms.errors import RefusedError
from algorithms.privacy.accounting import Budget
from algorithms.privacy.accounting.epsilon import ADD_OR_REMOVE_ONE, group_privacy, rdp
from algorithms.privacy.accounting.events import PureDpEvent, schedule_from_json, schedule_to_json
from algorithms.privacy.accounting.filters import conversion, epsilon_of_zcdp, rho_under
from algorithms.privacy.ledger import Composition, Ledger
from tests.algorithms.privacy.ledger.conftest import declared

CAP, ONE = Budget(8.0, 1e-5), Budget(1.0, 1e-6)
BLOCKS = "xyz"
EVENTS = [
    dp.GaussianDpEvent(3.0),
    dp.PoissonSampledDpEvent(0.01, dp.GaussianDpEvent(1.0)),
    PureDpEvent(0.25),
    dp.LaplaceDpEvent(4.0),
]
_KINDS = st.sampled_from(["reserve", "reserve", "settle", "settle less", "forfeit", "cap", "retire"])
_STEPS = st.lists(
    st.tuples(_KINDS, st.integers(0, 3), st.sets(st.sampled_from(BLOCKS), min_size=1), st.integers(1, 12)),
    max_size=14,
)


def _lost(ledger: Ledger, composition: Composition, person: tuple[str, ...]) -> float:
    """The epsilon of a person with a record in each of some blocks, from the rows' event lists alone."""
    runs: dict[str, tuple[Any, set[str]]] = {}
    for row in (row.to_json() for row in ledger.history()):
        if row["kind"] in ("reserve", "settle") and row["block"] in person:
            _, blocks = runs.get(row["run_id"], ((), set()))
            runs[row["run_id"]] = (row["events"], blocks | {row["block"]})
    total = 0.0
    for events, blocks in runs.values():
        schedule = [(group_privacy(event, len(blocks)), times) for event, times in schedule_from_json(events)]
        if composition.order is None:
            total += sum(times * rho_under(ADD_OR_REMOVE_ONE, event) for event, times in schedule)
        else:
            total += float(rdp(schedule, orders=(composition.order,))[0])
    if total == 0 or composition.order is None:
        return epsilon_of_zcdp(total, CAP.delta)
    return total + conversion(composition.order, CAP.delta)


def _do(ledger: Ledger, step: tuple[str, int, set[str], int], number: int) -> None:
    kind, run, blocks, size = step
    event, run_id = EVENTS[run], f"run-{run}-{number // 5}"
    many, one = (schedule_to_json([(event, count)]) for count in (size, 1))
    match kind:
        case "reserve":
            ledger.reserve(run_id, "patients", ONE, events=many, about={}, blocks=sorted(blocks))
        case "settle":
            ledger.settle(run_id, ONE, events=one)
        case "settle less":
            ledger.settle(run_id, Budget(0.5, 0.0), events=many)
        case "forfeit":
            ledger.forfeit(run_id)
        case "retire":
            ledger.retire_block("patients", min(blocks))
        case "cap":
            ledger.set_cap("patients", Budget(CAP.epsilon * size / 12, CAP.delta), block=min(blocks))


@settings(max_examples=25, deadline=None)
@given(_STEPS, st.sampled_from([Composition("renyi", 8.0), Composition("zcdp")]), st.sampled_from([1, 2]))
def test_no_history_takes_a_person_above_the_cap_and_no_block_pays_for_another(
    steps: list[tuple[str, int, set[str], int]], composition: Composition, count: int
) -> None:
    with TemporaryDirectory() as folder:
        ledger = declared(folder, *BLOCKS, cap=CAP, composition=composition, blocks_per_person=count)
        for number, step in enumerate(steps):
            before = {block: ledger.balance("patients", block) for block in BLOCKS}
            rows = len(ledger.history())
            try:
                _do(ledger, step, number)
            except RefusedError:
                assert len(ledger.history()) == rows
            touched = {row.block for row in ledger.history()[rows:]}
            assert all(ledger.balance("patients", block) == before[block] for block in set(BLOCKS) - touched)
            for person in combinations(BLOCKS, count):
                assert _lost(ledger, composition, person) <= CAP.epsilon * (1 + 1e-9)

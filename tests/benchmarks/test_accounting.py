"""The tables of docs/explanation/accountants.md: each number that is stated, beside the exact one, and on the page."""

import re
from pathlib import Path

import pytest

from algorithms.privacy.accounting.epsilon import epsilon
from benchmarks.accounting import Case, cases, ledger_rows

PAGE = (Path(__file__).parents[2] / "docs/explanation/accountants.md").read_text(encoding="utf-8")
DIGITS = 1e-9
"""What the exact values are rounded to."""


def cells(*first: str) -> list[str]:
    """The cells of the row of the page whose first cells are these."""
    (row,) = (line for line in PAGE.splitlines() if line.startswith(f"| {' | '.join(first)} |"))
    return [cell.strip() for cell in row.strip("|").split("|")]


@pytest.mark.parametrize("case", list(cases()), ids=lambda case: case.name)
def test_the_page_states_no_epsilon_below_the_exact_one_and_none_above_the_slack(case: Case) -> None:
    stated = epsilon(case.schedule_at(case.multiplier), case.delta, adjacency=case.adjacency)
    assert case.exact * (1 - DIGITS) <= stated <= max(1.001 * case.exact, case.exact + 1e-4)
    exact, on_page, above = cells(case.name, f"{case.delta:g}")[2:5]
    assert float(exact) == float(f"{case.exact:.6g}")
    assert float(on_page) == pytest.approx(stated, rel=1e-5)
    assert float(above) == pytest.approx(max(0.0, stated / case.exact - 1), abs=2e-6)


def test_the_page_has_each_case_once_and_each_price_of_the_ledger() -> None:
    table = re.findall(r"^\| [^|]+ \| 1e-\d+ \| [\d.]+ \|.*$", PAGE, re.MULTILINE)
    assert len(table) == len(list(cases()))
    for row in ledger_rows():
        name, exact, stated, general, _ = (cell.strip() for cell in row.strip("|").split("|"))
        assert cells(name)[1:4] == [exact, stated, general]
        assert float(exact) * (1 - 1e-5) <= float(stated) < float(general.split()[0]) / 2

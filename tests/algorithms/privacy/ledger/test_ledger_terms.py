"""What a population's runs are held to: once one is reserved the values stay."""

from pathlib import Path

import pytest

from algorithms.errors import RefusedError
from algorithms.privacy.accounting import Budget
from algorithms.privacy.ledger import Composition
from algorithms.privacy.ledger.chain import NOTHING, Draft, seal
from algorithms.privacy.ledger.store import INSERT
from tests.algorithms.privacy.ledger.conftest import CAP, opened, reserve


def test_the_first_value_of_each_name_stays_once_a_run_is_reserved(tmp_path: Path) -> None:
    ledger = opened(tmp_path)
    ledger.declare("patients", CAP, public=False, bound={"holdout": "a"})
    reserve(ledger, "first")
    ledger.declare("patients", CAP, public=False, bound={"holdout": "b"})
    ledger.declare("patients", CAP, public=False)
    assert opened(tmp_path).terms("patients").bound == {"holdout": "a"}
    assert [row.kind for row in ledger.history()] == ["population", "reserve"]
    ledger.declare("patients", CAP, public=False, bound={"holdout": "a", "blocks": "folder"})
    ledger.declare("patients", CAP, public=False, bound={"holdout": "a", "blocks": "sql"})
    assert opened(tmp_path).terms("patients").bound == {"holdout": "a", "blocks": "folder"}
    assert [row.kind for row in ledger.history()] == ["population", "reserve", "cap"]


def test_before_a_run_is_reserved_the_last_values_count(tmp_path: Path) -> None:
    """As where the first run was refused by its cap, so that nothing was trained under what its card said."""
    ledger = opened(tmp_path)
    ledger.declare("others", CAP, public=False, bound={"holdout": "a"})
    for value in ("a", "b", "b", "c"):
        ledger.declare("patients", CAP, public=False, bound={"holdout": value, "blocks": "folder"})
        assert opened(tmp_path).terms("patients").bound == {"holdout": value, "blocks": "folder"}
    assert [row.kind for row in ledger.history("patients")] == ["population", "cap", "cap"]
    reserve(ledger, "first")
    head = ledger.head()
    for bound in ({"holdout": "a"}, {"holdout": "c", "blocks": "sql"}):
        ledger.declare("patients", CAP, public=False, bound=bound)
    assert opened(tmp_path).terms("patients").bound == {"holdout": "c", "blocks": "folder"}
    assert (ledger.head(), ledger.terms("others").bound) == (head, {"holdout": "a"})
    ledger.forfeit("first")
    ledger.declare("patients", CAP, public=False, bound={"holdout": "a"})
    assert ledger.terms("patients").bound["holdout"] == "c"


def test_terms_that_contradict_bind_nothing(tmp_path: Path) -> None:
    """As those of a card that is refused, or the right card could be refused for them."""
    ledger = opened(tmp_path)
    ledger.declare("patients", CAP, public=False)
    ledger.declare("patients", CAP, public=True, bound={"holdout": "b"})
    ledger.declare("patients", CAP, public=False, composition=Composition("zcdp"), bound={"holdout": "b"})
    ledger.declare("patients", CAP, public=False, blocks_per_person=2, bound={"holdout": "b"})
    ledger.declare("patients", CAP, public=False, bound={"holdout": "a"})
    reserve(ledger, "first")
    ledger.declare("patients", CAP, public=False, bound={"holdout": "b", "blocks": "folder"})
    assert opened(tmp_path).terms("patients").bound == {"holdout": "a"}


def test_a_population_without_any_takes_the_first_and_keeps_its_cap(tmp_path: Path) -> None:
    """Runs were charged to it, and its cap was changed."""
    ledger = opened(tmp_path)
    ledger.declare("patients", CAP, public=False)
    reserve(ledger, "first")
    ledger.set_cap("patients", Budget(2.0, 1e-4))
    before, head = ledger.balance("patients"), ledger.head()
    assert ledger.terms("patients").bound == {}
    for value in ("first", "second"):
        ledger.declare("patients", CAP, public=False, bound={"holdout": value})
    again = opened(tmp_path)
    assert again.terms("patients").bound == {"holdout": "first"}
    assert again.balance("patients") == before
    again.verify()
    again.check_contains(head)
    ledger.set_cap("patients", Budget(1.75, 1e-4))
    assert opened(tmp_path).terms("patients").bound == {"holdout": "first"}


def test_rows_of_another_version_are_refused_in_a_sentence(tmp_path: Path) -> None:
    ledger = opened(tmp_path)
    draft = Draft("population", "patients", CAP, about={"public": False})
    with ledger._store.place.engine.begin() as connection:
        row = seal(draft, after=NOTHING, written_at="now", written_by="another version")
        connection.execute(INSERT, row._asdict())
    with pytest.raises(RefusedError, match=r"^row 1 of the ledger was written by another version .*\.$"):
        ledger.balance("patients")

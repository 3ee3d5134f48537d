"""What the database itself lets an owner, a runner and an auditor do, on a PostgreSQL server started here."""

from collections.abc import Callable

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

from algorithms.errors import RefusedError
from algorithms.privacy.accounting import Budget
from algorithms.privacy.ledger import Ledger, NotAllowedError
from algorithms.privacy.ledger.roles import init

CAP, ONE = Budget(3.0, 1e-4), Budget(1.0, 1e-5)
USERS = {"alice": "owner", "bob": "runner", "ben": "runner", "carol": "auditor", "nobody": None}
Open = Callable[[str], Ledger]


@pytest.fixture
def url_of(new_database: Callable[..., sa.URL]) -> Callable[[str], str]:
    """The URL of a new ledger with its roles, by the name of a user."""
    admin = new_database()
    with sa.create_engine(admin, isolation_level="AUTOCOMMIT").connect() as connection:
        for user in USERS:
            known = connection.exec_driver_sql(f"SELECT 1 FROM pg_roles WHERE rolname = '{user}'").scalar()
            if not known:
                connection.exec_driver_sql(f"CREATE ROLE {user} LOGIN PASSWORD 'of {user}'")

    def url(user: str) -> str:
        of_user = admin if user == "admin" else admin.set(username=user, password=f"of {user}")
        return of_user.render_as_string(hide_password=False)

    members: dict[str, list[str]] = {}
    for user, role in USERS.items():
        members.setdefault(role or "", []).append(user)
    members.pop("")
    expected = tuple(f"{admin.database}_{role}" for role in ("owner", "runner", "auditor"))
    assert init(url("admin"), members) == init(url("admin")) == expected  # type: ignore[arg-type]
    return url


def test_each_does_what_the_role_is_for_and_the_row_says_who_did_it(url_of: Callable[[str], str]) -> None:
    alice, bob = Ledger.open(url_of("alice")), Ledger.open(url_of("bob"))
    alice.declare("patients", CAP, public=False)
    alice.declare("others", CAP, public=False, bound={"unit": "a person"})
    bob.declare_block("patients", "january")  # at the population's cap, as blocks that arrive are
    bob.reserve("a", "patients", ONE, events=[], about={}, blocks=["january"], held={"january": ["x"]})
    bob.settle("a", Budget(0.5, 0.0), events=[])
    bob.reserve("b", "others", ONE, events=[], about={})
    bob.forfeit("b")
    alice.set_cap("patients", Budget(1.5, 1e-4), block="january")
    alice.retire_block("patients", "january")
    alice.reserve("c", "others", ONE, events=[], about={})
    carol = Ledger.open(url_of("carol"))
    assert [row.written_by for row in carol.history()] == ["alice"] * 2 + ["bob"] * 5 + ["alice"] * 3
    assert carol.verify().read == 10
    assert carol.balance("patients", "january").spent == Budget(0.5, 0.0)


def test_the_database_refuses_what_the_role_is_not_for(url_of: Callable[[str], str]) -> None:
    alice, bob = Ledger.open(url_of("alice")), Ledger.open(url_of("bob"))
    ben, carol = Ledger.open(url_of("ben")), Ledger.open(url_of("carol"))
    alice.declare("patients", CAP, public=False)
    alice.declare_block("patients", "january")
    bob.reserve("a", "patients", ONE, events=[], about={}, blocks=["january"])
    before = alice.history()
    refused = [
        lambda: bob.set_cap("patients", Budget(9.0, 1e-3)),
        lambda: bob.set_cap("patients", Budget(9.0, 1e-3), block="january"),
        lambda: bob.declare("mine", CAP, public=False),
        lambda: bob.declare_block("patients", "february", Budget(9.0, 1e-3)),
        lambda: bob.retire_block("patients", "january"),
        lambda: bob.overrule("patients", "january", "february", by="the owner"),
        lambda: ben.forfeit("a"),
        lambda: ben.settle("a", Budget(0.0, 0.0), events=[]),
        lambda: carol.reserve("c", "patients", ONE, events=[], about={}, blocks=["january"]),
        lambda: carol.forfeit("a"),
        lambda: Ledger.open(url_of("nobody")),
    ]
    for act in refused:
        with pytest.raises(
            NotAllowedError, match=r"does not let (bob|ben|carol|nobody) do this; ask its owner"
        ):
            act()
    assert alice.history() == before
    alice.verify()


@pytest.mark.parametrize(
    ("user", "statement"),
    [
        ("alice", "DELETE FROM epsilonflow_ledger"),
        ("admin", "DELETE FROM epsilonflow_ledger"),
        ("bob", "UPDATE epsilonflow_account SET epsilon = 9"),
        ("carol", "UPDATE epsilonflow_head SET seq = 0"),
    ],
)
def test_the_database_refuses_statements_of_ones_own(
    url_of: Callable[[str], str], user: str, statement: str
) -> None:
    Ledger.open(url_of("alice")).declare("patients", CAP, public=False)
    engine = sa.create_engine(url_of(user), poolclass=sa.NullPool)
    words = "permission denied|never changed or removed"
    with pytest.raises(DBAPIError, match=words), engine.begin() as connection:
        connection.exec_driver_sql(statement)
    assert Ledger.open(url_of("carol")).verify().read == 1


def test_a_member_must_be_there_and_a_file_has_no_roles(
    url_of: Callable[[str], str], tmp_path: object
) -> None:
    with pytest.raises(RefusedError, match=r"has no user 'zoe'; create it there first"):
        init(url_of("admin"), {"runner": ["zoe"]})
    with pytest.raises(NotAllowedError):
        init(url_of("alice"), {})
    assert init(f"sqlite:///{tmp_path}/ledger.sqlite") == ()

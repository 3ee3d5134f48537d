"""Pages as a person sees them: the ledger's and a run's, at phone width too, and what the ledger's page says."""

import ast
import re
from pathlib import Path

import pytest

from algorithms.privacy.accounting import Budget
from algorithms.privacy.card import text as sentences
from algorithms.privacy.ledger import Composition, Ledger
from tasks.ledger_page import page
from tasks.reporting import environment
from tests.support.browser import seen
from tests.support.checkout import PROJECT, Checkout

EVENTS = [{"event": {"type": "GaussianDpEvent", "noise_multiplier": 4.0}, "count": 1}]


@pytest.fixture
def ledger(own_home: Path) -> Ledger:
    """Two populations: one with blocks and three runs, of which one is open, and one that nobody used."""
    ledger = Ledger.open(f"sqlite:///{own_home}/ledger.sqlite")
    ledger.declare("patients <b>", Budget(4.0, 1e-4), public=False, blocks_per_person=1)
    ledger.declare("nobody", Budget(1.0, 1e-6), public=False, composition=Composition("zcdp"))
    for week in ("2026-W01", "2026-W02"):
        ledger.declare_block("patients <b>", week, Budget(4.0, 1e-4))
    notes = {"algorithm": "dp_sgd", "dataset": "visits by the week", "card_key": "ab" * 32}
    for number in range(3):
        run_id = f"5f0c3a9be1d2774{number}-1"
        cost = Budget(1.0, 1e-6)
        ledger.reserve(run_id, "patients <b>", cost, events=EVENTS, notes=notes, blocks=("2026-W01",))
        if number < 2:
            ledger.settle(run_id, cost, events=EVENTS)
    return ledger


def test_header_cells_say_what_they_head() -> None:
    cells = [
        cell
        for path in (PROJECT / "tasks").rglob("*.j2")
        for cell in re.findall(r"<th\b[^>]*>", path.read_text())
    ]
    assert len(cells) > 20 and [cell for cell in cells if "scope=" not in cell] == []


def test_templates_call_sentences_that_there_are() -> None:
    """A name that is gone is no error until a page is made, and then no run has a report."""
    templates = [path.read_text() for path in (PROJECT / "tasks").rglob("*.j2")]
    called = {name for text in templates for name in re.findall(r"\bsaid\.(\w+)\(", text)}
    assert {"statement", "side_channels"} < called
    assert {name for name in called if not hasattr(sentences, name)} == set()


def test_the_ledgers_page_says_who_spent_what_and_what_is_left(ledger: Ledger) -> None:
    made = page(ledger)
    text = re.sub(
        r"\s+", " ", re.sub(r"<[^>]+>", " ", re.sub(r"<style>.*?</style>", "", made, flags=re.DOTALL))
    )
    assert "Population patients &lt;b&gt;" in text and "<b>" not in re.findall("patients.{10}", made)[0]
    assert "2 epsilon spent, of 4 1 reserved by open runs 1 left for one more run" in text
    assert "1 more run like the last one fit" in text
    assert "ten more" not in text  # which would exceed the cap
    assert "2026-W02 0 0 4 4" in text
    assert "5f0c3a9be1d27742-1 dp_sgd, visits by the week 2026-W01 1 open abababab" in text
    assert "Epsilon spent, from" in text and "the cap (dashed)." in text
    assert "Population nobody" in text and "There has been no run yet." in text
    assert ledger.head() in made
    assert not re.search(r"https?://|<script|<link(?! rel=.icon. href=.data:,.>)", made)


def test_private_populations_come_first_and_public_ones_are_folded(ledger: Ledger) -> None:
    ledger.declare("all adults", Budget(9.0, 1e-4), public=True)
    ledger.declare("nobody else", Budget(1.0, 1e-6), public=False)
    made = page(ledger)
    names = re.findall(r"(<h2>|<summary>)Population ([^<,]+)", made)
    assert names == [
        ("<h2>", "patients &lt;b&gt;"),
        ("<h2>", "nobody"),
        ("<h2>", "nobody else"),
        ("<summary>", "all adults"),
    ]
    assert made.count("<details") == made.count("</details>") == 1
    assert "<th>" not in made and '<th scope="col">epsilon</th>' in made


def test_the_ledgers_page_explains_numbers_that_do_not_add_up(own_home: Path) -> None:
    """Under zCDP spent and left are an epsilon each, and blocks have budgets of their own."""
    ledger = Ledger.open(f"sqlite:///{own_home}/ledger.sqlite")
    ledger.declare(
        "visits", Budget(3.0, 1e-5), public=False, composition=Composition("zcdp"), blocks_per_person=1
    )
    for week in ("2026-W01", "2026-W02"):
        ledger.declare_block("visits", week)
    for number in range(2):
        ledger.reserve(
            f"run-{number}", "visits", Budget(1.0, 1e-6), events=EVENTS, notes={}, blocks=("2026-W01",)
        )
        ledger.settle(f"run-{number}", Budget(1.0, 1e-6), events=EVENTS)
    spent, left = ledger.balance("visits").spent.epsilon, ledger.balance("visits").remaining.epsilon
    assert spent + left > 3.0
    text = re.sub(r"\s+", " ", page(ledger))
    assert "block 2026-W01, which has spent the most; no other has less left" in text
    assert "the axis goes from 0 to 3, the cap (dashed)" in text
    assert "Here epsilons do not add up" in text and "spent and left together may exceed the cap" in text
    assert "like the last one fit into every block that is not retired" in text
    ledger.retire_block("visits", "2026-W01")
    assert "2026-W01, which has spent the most, and is retired; no other" in re.sub(r"\s+", " ", page(ledger))


def test_a_ledger_without_rows_has_a_page(own_home: Path) -> None:
    assert "Nothing has been charged yet" in page(Ledger.open(f"sqlite:///{own_home}/ledger.sqlite"))


@pytest.mark.parametrize(("width", "dark"), [(390, True), (1200, False)])
def test_the_ledgers_page_is_readable_at_any_width(
    ledger: Ledger, tmp_path: Path, width: int, dark: bool
) -> None:
    found = seen(page(ledger), tmp_path, width=width, dark=dark)
    # less than three lines: the rest of a table is to be scrolled to
    assert found.texts > 20 and found.tall < 3 * 27
    assert (found.wide, found.faint, found.small, found.complaints) == (0, [], [], [])


def test_the_report_of_a_run_is_readable_on_a_phone(finished_once: Checkout, tmp_path: Path) -> None:
    made = (finished_once.root / "artifacts/report.html").read_text()
    assert "The area under the ROC curve is 0." in made and "off on average" in made
    found = seen(made, tmp_path, width=360)
    assert found.texts > 20
    assert (found.wide, found.faint, found.small, found.complaints) == (0, [], [], [])


def test_percentages_are_written_without_a_space() -> None:
    """Every text of the product that a person may see: templates, and strings that are no docstrings."""
    wrong = []
    for path in sorted(
        path for folder in ("tasks", "flows", "algorithms") for path in (PROJECT / folder).rglob("*")
    ):
        if path.suffix == ".j2":
            texts = re.sub(r"{%.*?%}", "", path.read_text(), flags=re.DOTALL).splitlines()
        elif path.suffix == ".py":
            source = path.read_text()
            if not re.search(r"""[}"'] %|\d(?: |&nbsp;|\u00a0|\\u00a0|\\xa0)%""", source):
                continue  # to parse all files takes seconds
            tree = ast.parse(source)
            said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
            texts = [
                str(node.value)
                for node in ast.walk(tree)
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in said
            ]
        else:
            continue
        wrong += [f"{path}: {text}" for text in texts if re.search(r"^ %|\d(?: |&nbsp;|\u00a0)%|}} %", text)]
    assert not wrong


def test_the_look_itself_finds_what_is_wide_and_faint(tmp_path: Path) -> None:
    texts = '<p style="color:#aaa">faint</p><p style="font-size:10px">tiny</p>'
    bad = f'<body style="background:#fff">{texts}<div style="width:900px">w</div></body>'
    found = seen(bad, tmp_path, width=500)
    assert (found.faint, found.small) == (["faint"], ["tiny"]) and found.wide > 300


@pytest.mark.parametrize(
    ("spent", "allowed", "shown"),
    [
        (1.6414551, 1.641456, "1.64146 of 1.64146"),  # in three digits it would be 1.65
        (1.6414551, 2.0, "1.65 of 2"),
        (0.49996, 0.5, "0.5 of 0.5"),
        (0.6, 0.5, "0.6 of 0.5"),
        (0.6, None, "0.6 of none"),
        (None, 0.5, "infinite of 0.5"),
    ],
)
def test_what_was_spent_does_not_look_like_more_than_allowed(
    spent: float | None, allowed: float | None, shown: str
) -> None:
    template = environment().from_string("{{ spent | spent(allowed, 3) }} of {{ allowed | allowed }}")
    assert template.render(spent=spent, allowed=allowed) == shown

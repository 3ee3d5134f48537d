"""Each line of the page for whoever answers points to a fact that is there, or says that nobody has answered it."""

import dataclasses
import html
import json
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML
from typer.testing import CliRunner

from algorithms.privacy.card import PrivacyCard, build
from algorithms.privacy.card.text import statement
from flows.cli.main import app
from tasks.authority import MUST_ANSWER, Line, page, sources
from tasks.reporting import AuditSummary
from tests.algorithms.privacy.conftest import KEY
from tests.support.browser import seen
from tests.support.cards import DEPLOYMENT, animals
from tests.support.synthetic_run import Folders, record, write_run

AUDIT = AuditSummary(
    method="dp_sgd", epsilon_lower_bound=1.25, claimed=3.0, is_violated=False, at="2026-01-31T00:00:00"
)
METRICS = {"test_accuracy": 0.8, "test_loss": 0.61}


def run_in(folder: Path, **settings: Any) -> tuple[Folders, PrivacyCard]:
    folders = write_run(folder, **settings)
    card = build(record(folders), KEY)
    (folders.artifacts / "privacy_card.json").write_bytes(card.to_bytes())
    return folders, card


def lines(card: PrivacyCard, metrics: Any = None, audit: Any = None) -> list[Line]:
    return [line for source in sources(card, metrics, audit) for line in source.lines]


def test_each_fact_names_fields_that_the_card_has(tmp_path: Path) -> None:
    _, card = run_in(tmp_path)
    document = card.to_json()
    for line in lines(card, METRICS, AUDIT):
        assert line.where and (line.fact is None or line.fact.strip())
        where = line.where.split(";")[0]
        if not where.startswith("card: "):
            continue
        for name in where.removeprefix("card: ").split(", "):
            part: Any = document
            for key in name.split("."):
                part = part[key]


def test_facts_beside_each_other_are_sentences(tmp_path: Path) -> None:
    folders, card = run_in(tmp_path)
    assert "`" not in page(card, folders.artifacts, tmp_path)
    facts = [line.fact or "" for line in lines(card)]
    assert any("key from the operating system. " in fact for fact in facts)


def test_what_is_not_there_is_left_to_answer(tmp_path: Path) -> None:
    _, card = run_in(tmp_path)
    without, given = lines(card), lines(card, METRICS, AUDIT)
    assert sum(line.fact is None for line in without) == sum(line.fact is None for line in given) + 4
    assert any("at least epsilon 1.25 was found where 3 was claimed" in (line.fact or "") for line in given)
    violated = lines(card, METRICS, AUDIT.model_copy(update={"is_violated": True}))
    assert any("refutes its claim" in (line.fact or "") for line in violated)
    # Whether it is lawful, harmless or anonymous is nobody's to say but yours.
    for words in ("meaningful privacy in this use", "likelihoods insignificant", "discriminatory"):
        (line,) = [line for line in given if words in line.question]
        assert line.fact is None


def test_released_metrics_of_groups_are_stated_and_their_meaning_is_not(tmp_path: Path) -> None:
    _, card = run_in(tmp_path)
    groups = {
        "sex": [{"group": "f", "accuracy": {"value": 0.81, "low": 0.78, "high": 0.84}}, {"group": "<m>"}]
    }
    asked = "3 What is the accuracy for specific persons or groups"
    released = {
        "held_out": "private",
        "evaluation_epsilon": 1.0,
        "test_accuracy": {"value": 0.8, "low": 0.7, "high": 0.9},
        "groups": groups,
    }
    (without,) = [line for line in lines(card, METRICS) if line.question.startswith(asked)]
    (stated,) = [line for line in lines(card, released) if line.question.startswith(asked)]
    assert without.fact is None and "privacy.evaluation.by" in without.where
    assert stated.fact is not None
    assert stated.fact.startswith("Released by sex: f 81.00%, 78.00% to 84.00%; <m> unknown.")


def test_each_source_has_a_date_and_says_how_near_its_questions_are(tmp_path: Path) -> None:
    folders, card = run_in(tmp_path)
    text = html.unescape(page(card, folders.artifacts, tmp_path))
    for words in ("March 2025. Paraphrased", "17 December 2024. Paraphrased", "13 June 2024. Shortened"):
        assert words in text
    # What could not be read is named, and so is what the wording of each question rests on.
    for words in ("sections 2 to 4 of the initial public draft", "sections 3.2.2 and 3.2.3 was not read"):
        assert words in text


def test_every_section_and_every_point_has_a_line(tmp_path: Path) -> None:
    """By the contents of the draft of SP 800-226 and the points of Annex IV in the Regulation."""
    _, card = run_in(tmp_path)
    nist, _, ai_act = sources(card, None, None)
    sections = [
        *(
            "2.2",
            "2.3",
            "2.4",
            "2.5",
            "2.6",
            "3.1",
            "3.2",
            "3.3.1",
            "3.3.2",
            "3.3.3",
            "3.4",
            "3.5",
            "3.6",
            "3.7",
        ),
        *("4.1", "4.2", "4.3", "4.4", "4.5"),
    ]
    for section in sections:
        assert any(section in line.question.split() for line in nist.lines), section
    asked = " ".join(line.question for line in ai_act.lines).replace("1(e) to 1(h)", "1(e) 1(f) 1(g) 1(h)")
    points = [*(f"1({part})" for part in "abcdefgh"), *(f"2({part})" for part in "abcdefgh"), *"3456789"]
    assert [point for point in points if point not in asked.split()] == []


def test_questions_are_those_of_their_sections(tmp_path: Path) -> None:
    """4.5 is on collecting less, 2.5 on comparing guarantees; what all runs cost together is in 2.2."""
    _, card = run_in(tmp_path)
    asked = {line.question: line for line in lines(card)}
    (collected,) = [line for question, line in asked.items() if question.startswith("4.5 ")]
    (compared,) = [line for question, line in asked.items() if question.startswith("2.5 ")]
    assert "be collected at all" in collected.question and collected.fact is None
    assert compared.fact == (
        "With those of the same delta, 1e-05, and the same unit, one record (one drawing), added or removed."
    )
    (together,) = [line for question, line in asked.items() if "all analyses of the same data" in question]
    assert together.question.startswith("2.2 ") and "all runs add up" in (together.fact or "")


def test_adaptive_releases_are_not_said_to_be_fixed_before(tmp_path: Path) -> None:
    _, card = run_in(tmp_path)
    composition = card.accounting.composition.model_copy(update={"kind": "zcdp"})
    adaptive = card.model_copy(
        update={"accounting": card.accounting.model_copy(update={"composition": composition})}
    )
    for some, fixed in ((card, True), (adaptive, False)):
        (line,) = [line for line in lines(some) if line.question.startswith("4.1 ")]
        assert ("were fixed before the first one, so" in (line.fact or "")) is fixed
        assert ("chosen adaptively" in (line.fact or "")) is not fixed


def test_purpose_and_provider_are_those_of_the_data_card(tmp_path: Path) -> None:
    folders, card = run_in(tmp_path)
    assert "planning of beds" not in page(card, folders.artifacts, tmp_path)
    (tmp_path / "data/cards").mkdir(parents=True)
    document = json.loads(animals().model_dump_json()) | {"deployment": DEPLOYMENT}
    YAML(typ="safe", pure=True).dump(document, tmp_path / "data/cards/animals.yaml")
    text = page(card, folders.artifacts, tmp_path)
    assert "Purpose: planning of beds. Provider: The clinic. Version: run" in text


def test_a_seeded_run_says_first_that_it_is_not_private(tmp_path: Path) -> None:
    folders, card = run_in(tmp_path, kind="seeded")
    text = html.unescape(page(card, folders.artifacts, tmp_path))
    assert text.index("NOT PRIVATE") < text.index("NIST SP 800-226")
    assert statement(card) in text


@pytest.mark.parametrize("width", [390, 1200])
def test_sentences_are_read_without_scrolling_sideways(tmp_path: Path, width: int) -> None:
    """Also beside a digest, which is one long word."""
    folders, card = run_in(tmp_path)
    text = page(card, folders.artifacts, tmp_path).replace(MUST_ANSWER, f"SHA-256 {64 * 'a'}")
    shown = seen(text, tmp_path, width=width)
    assert (shown.wide, shown.scrolled, shown.faint, shown.complaints) == (0, 0, [], [])


def test_the_command_writes_a_page_that_loads_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders, card = run_in(tmp_path)
    (tmp_path / "audits/dp_sgd").mkdir(parents=True)
    (tmp_path / "audits/dp_sgd/audit.json").write_text(AUDIT.model_dump_json())
    (tmp_path / "params.yaml").touch()
    (tmp_path / "dvc.yaml").touch()
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["report", "--for", "authority", "--output", "page.html"])
    assert done.exit_code == 0, done.output
    text = (tmp_path / "page.html").read_text()
    assert text.count(MUST_ANSWER) == sum(line.fact is None for line in lines(card, METRICS, AUDIT))
    assert "<drawn>" not in text and "src=" not in text and "script" not in text
    assert CliRunner().invoke(app, ["report", "--for", "nobody"]).exit_code != 0
    assert dataclasses.asdict(lines(card)[0])["where"].startswith("card: setting")
    assert folders.artifacts.is_dir()

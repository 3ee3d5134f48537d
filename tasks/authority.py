"""What whoever answers for a model is asked, beside the facts of its card, audit and metrics that answer it.

Each line has a fact with its place, or says that you must answer. No line concludes anything in law.

Sources: NIST SP 800-226, Guidelines for Evaluating Differential Privacy Guarantees, March 2025. European Data
Protection Board, Opinion 28/2024 on data protection aspects of AI models, 17 December 2024, section 3.2. Regulation
(EU) 2024/1689 (AI Act) of 13 June 2024, Annex IV, points 1 to 3.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from algorithms.privacy.card import PrivacyCard
from algorithms.privacy.card import text as words
from data.files import read_json
from tasks.reporting import AUDIT, audit_folder, environment
from tasks.runs.metrics import format_metric, held_out_metrics, is_private, private_words

MUST_ANSWER = "You must answer."


@dataclass(frozen=True)
class Line:
    """A question, the fact that answers it, or None, and where the fact is; or why none is there."""

    question: str
    fact: str | None
    place: str


@dataclass(frozen=True)
class Source:
    """A document that asks."""

    title: str
    published: str
    lines: tuple[Line, ...]


def sources(
    card: PrivacyCard, metrics: Mapping[str, Any] | None, audit: Mapping[str, Any] | None
) -> tuple[Source, ...]:
    """The questions of each document with what the run's documents say."""
    return (_nist(card, audit, metrics), _edpb(card, audit), _ai_act(card, metrics))


def _open(question: str, why: str) -> Line:
    return Line(question, None, why)


def _nist(card: PrivacyCard, audit: Mapping[str, Any] | None, metrics: Mapping[str, Any] | None) -> Source:
    ran = card.implementation
    return Source(
        "NIST SP 800-226, Guidelines for Evaluating Differential Privacy Guarantees",
        "March 2025",
        (
            Line(
                "What are the privacy parameters?", words.statement(card), "card: setting, accounting.epsilon"
            ),
            Line(
                "What is the unit of privacy?",
                words.protection_sentence(card),
                "card: setting.unit, setting.adjacency",
            ),
            Line("How do releases compose?", words.population(card), "card: accounting; the ledger"),
            Line(
                "Who is trusted with the data?",
                "The curator, the machine and the code that ran; see the threat model.",
                "docs/threat-model.md",
            ),
            Line(
                "Are the mechanism and its implementation correct?",
                f"{words.noise(card)} {words.software(card)}. {words.rounding(ran.rounding, ran.device)}",
                "card: implementation; recomputed by verify_card.py",
            ),
            _audit_line("Was the implementation tested against its claim?", audit),
            Line("Are hyperparameters part of the cost?", words.tuning(card), "card: events"),
            Line(
                "What side channels remain?",
                words.side_channels(card),
                "card: implementation; docs/threat-model.md",
            ),
            _utility("How useful is what is released?", metrics),
            _open(
                "Is the value of epsilon suited to this use?",
                "a judgement about people and harm, which no run makes",
            ),
            _open("Who has access to the data, and how is it collected and kept?", "outside of training"),
        ),
    )


def _edpb(card: PrivacyCard, audit: Mapping[str, Any] | None) -> Source:
    setting = card.setting
    return Source(
        "EDPB Opinion 28/2024, section 3.2: what is considered where a model is claimed to be anonymous",
        "17 December 2024",
        (
            Line(
                "From which sources are the training data?",
                f"{setting.title}; {setting.source}",
                "card: setting.source",
            ),
            _open(
                "Were sources chosen, and data minimised, for the purpose?",
                "the data card lists columns, not reasons",
            ),
            Line(
                "Which methods limit what the model keeps of one person?",
                words.statement(card),
                "card: setting, events",
            ),
            Line("How were records prepared?", words.transform(card.mechanism), "card: mechanism.transform"),
            Line(
                "Who or what is left out of that?",
                " ".join(words.not_protected(card)),
                "card: setting, mechanism",
            ),
            _audit_line("Was resistance to attacks tested, such as membership inference?", audit),
            _open(
                "Were attacks on this very model tested: inversion, extraction, reconstruction?",
                "audits try the method on made-up records, not this model",
            ),
            _open(
                "Is the likelihood of identification insignificant, by all means reasonably likely to be"
                " used?",
                "a conclusion for you, of which the facts above are a part",
            ),
            _open(
                "Is there an impact assessment, and advice of the data protection officer?",
                "not known to a run",
            ),
        ),
    )


def _ai_act(card: PrivacyCard, metrics: Mapping[str, Any] | None) -> Source:
    setting, mechanism = card.setting, card.mechanism
    records = "private, and not on the card" if setting.records is None else f"{setting.records:,}"
    model = f"{mechanism.model.name}, {mechanism.model.parameters:,} parameters, trained by {mechanism.algorithm}."
    return Source(
        "AI Act, Regulation (EU) 2024/1689, Annex IV: items on data and accuracy",
        "13 June 2024",
        (
            _open(
                "1(a) What is the system's intended purpose, and who provides it?",
                "`deployment` of the data card may say so",
            ),
            Line(
                "2(a) How was it developed, with what third-party parts?",
                f"{model} {words.model_parts(mechanism.model)}",
                "card: mechanism.model",
            ),
            Line(
                "2(b) What are the design choices, and what is optimised?",
                words.features(mechanism.features),
                "card: mechanism; plan.json",
            ),
            Line(
                "2(d) What are the training data, their provenance, scope and main characteristics?",
                f"{setting.title}. Source: {setting.source}. Licence: {setting.licence}."
                f" Number of records: {records}.",
                "card: setting; the data card",
            ),
            _open("2(d) How were the data selected, labelled and cleaned?", "before the data card"),
            _utility("2(g) How was it validated and tested, with what accuracy?", metrics),
            _open(
                "2(g) What are potentially discriminatory impacts?",
                "metrics are of all held-out records together",
            ),
            _open(
                "3 What is the accuracy for specific persons or groups?",
                "no metric of a group is computed, since each would tell of its records",
            ),
        ),
    )


def _audit_line(question: str, audit: Mapping[str, Any] | None) -> Line:
    if audit is None:
        return _open(question, "no audit of the method is in this checkout: `epsilonflow audit`")
    verdict = "refutes" if audit["is_violated"] else "does not refute"
    fact = (
        f"An audit of {audit['method']} on made-up records {verdict} its claim: at least epsilon {audit['found']:.3g}"
        f" was found where {audit['claimed']:.3g} was claimed."
    )
    return Line(question, fact, f"{audit_folder(audit['method'])}/{AUDIT}, of {audit['at']}")


def _utility(question: str, metrics: Mapping[str, Any] | None) -> Line:
    if not metrics:
        return _open(question, "no metrics.json lies beside the card")
    measured = {name: value for name, value in held_out_metrics(metrics).items() if value is not None}
    shown = "; ".join(
        f"{name.replace('_', ' ')} {format_metric(value, name)}" for name, value in measured.items()
    )
    of = private_words(metrics) if is_private(metrics) else "declared public"
    return Line(question, f"On held-out records, which are {of}: {shown or 'nothing'}.", "metrics.json")


def page(card: PrivacyCard, artifacts: Path, root: Path) -> str:
    """The page as HTML, which prints."""
    metrics, audit = artifacts / "metrics.json", root / audit_folder(card.mechanism.algorithm) / AUDIT
    asked: Sequence[Source] = sources(
        card,
        read_json(metrics) if metrics.is_file() else None,
        read_json(audit) if audit.is_file() else None,
    )
    made = environment(below=Path(__file__).parent)
    return made.get_template("authority.html.j2").render(
        card=card, sources=asked, must_answer=MUST_ANSWER, statement=words.statement(card)
    )

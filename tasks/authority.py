"""What whoever answers for a model is asked, beside the facts of its card, audit and metrics that answer it.

Each line has a fact with its place, or says that you must answer. No line concludes anything in law.

Sources, and how far they were read. Regulation (EU) 2024/1689 (AI Act) of 13 June 2024, Annex IV: points 1 to 9 as they
are worded; those on data and accuracy are shortened here. NIST SP 800-226, Guidelines for Evaluating Differential
Privacy Guarantees: the initial public draft of 11 December 2023, whose pyramid names the components; of the final
version of March 2025 the abstract alone. European Data Protection Board, Opinion 28/2024 on certain data protection
aspects related to the processing of personal data in the context of AI models, 17 December 2024: its executive summary
and an outline of section 3.2.2. What was not read word for word is a paraphrase, and the page says so.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from algorithms.privacy.card import PrivacyCard
from algorithms.privacy.card import text as words
from data.files import read_json
from tasks.reporting import AUDIT, AuditSummary, audit_folder, environment, newest_audit
from tasks.runs.metrics import (
    Metrics,
    format_metric,
    group_metrics,
    held_out_metrics,
    is_private,
    private_words,
)

MUST_ANSWER = "You must answer."


@dataclass(frozen=True)
class Line:
    """A question, the fact that answers it, or None, and where the fact is; or why none is there."""

    question: str
    fact: str | None
    place: str


@dataclass(frozen=True)
class Source:
    """A document that asks. wording: how near to it the questions are."""

    title: str
    published: str
    wording: str
    lines: tuple[Line, ...]


def sources(card: PrivacyCard, metrics: Metrics | None, audit: AuditSummary | None) -> tuple[Source, ...]:
    """The questions of each document with what the run's documents say."""
    return (_nist(card, audit, metrics), _edpb(card, audit), _ai_act(card, metrics))


def _open(question: str, why: str) -> Line:
    return Line(question, None, why)


def _nist(card: PrivacyCard, audit: AuditSummary | None, metrics: Metrics | None) -> Source:
    ran = card.implementation
    return Source(
        "NIST SP 800-226, Guidelines for Evaluating Differential Privacy Guarantees",
        "March 2025",
        "Paraphrased, and held against the components of the pyramid and the sections of the initial public draft of 11"
        " December 2023, whose numbers these are; of the final version the abstract was read, so its numbers and words"
        " may be others.",
        (
            Line(
                "2.2 and 2.3 What are epsilon and the other parameters, of which variant?",
                words.statement(card),
                "card: setting, accounting.epsilon",
            ),
            Line(
                "2.4 What is the unit of privacy?",
                words.protection_sentence(card),
                "card: setting.unit, setting.adjacency",
            ),
            Line(
                "2.5 What do all releases on the same people cost together?",
                words.population(card),
                "card: accounting; the ledger",
            ),
            Line(
                "2.6 Is anything released beside it without differential privacy?",
                " ".join(words.not_protected(card)),
                "card: setting, mechanism",
            ),
            _utility("3.2 How useful is what is released?", metrics),
            _open(
                "3.3 Does it create or magnify systemic, human or statistical bias?",
                "metrics of groups, which privacy.evaluation.by names, help to answer it",
            ),
            Line("3.5 Are choices of settings part of the cost?", words.tuning(card), "card: events"),
            Line(
                "4.1 How may the data be queried?",
                "By one training run, whose releases were decided before the records were read; nobody asks queries.",
                "card: mechanism.queries, accounting.composition",
            ),
            Line(
                "4.2 Who is trusted, and who is an adversary?",
                "The curator, the machine and the code that ran are trusted; see the threat model.",
                "docs/threat-model.md",
            ),
            Line(
                "4.3 Are algorithm and implementation correct, floating-point arithmetic included?",
                f"{words.noise(card)}. {words.software(card)}. {words.rounding(ran.rounding, ran.device)}",
                "card: implementation; recomputed by verify_card.py",
            ),
            _audit_line("4.3 Was the implementation tested against its claim?", audit),
            Line(
                "4.3 What side channels remain?",
                words.side_channels(card),
                "card: implementation; docs/threat-model.md",
            ),
            _open("4.4 How are the raw data stored, and who has access to them?", "outside of training"),
            _open("4.5 To whom were the data exposed when they were collected?", "outside of training"),
            _open(
                "2.2 Is the value of epsilon suited to this use?",
                "a judgement about people and harm, which no run makes",
            ),
        ),
    )


def _edpb(card: PrivacyCard, audit: AuditSummary | None) -> Source:
    setting = card.setting
    return Source(
        "EDPB Opinion 28/2024, section 3.2.2: what is considered where a model is claimed to be anonymous",
        "17 December 2024",
        "Paraphrased. The line on likelihood was held against the executive summary; the others were held against the"
        " headings of section 3.2.2 alone, whose text was not read.",
        (
            Line(
                "Selection of sources: from which are the training data?",
                f"{setting.title}; {setting.source}",
                "card: setting.source",
            ),
            _open(
                "Selection of sources: what was done to avoid or limit personal data, and to leave out inappropriate"
                " sources?",
                "before the data card",
            ),
            Line(
                "Data preparation: how were records prepared?",
                words.transform(card.mechanism),
                "card: mechanism.transform",
            ),
            _open(
                "Data preparation and minimisation: could anonymous or pseudonymised data do, and was less used?",
                "the data card lists columns, not reasons",
            ),
            Line(
                "Methodological choices: which methods, such as differential privacy, limit what the model keeps of one"
                " person?",
                words.statement(card),
                "card: setting, events",
            ),
            Line(
                "Methodological choices: who or what is left out of that?",
                " ".join(words.not_protected(card)),
                "card: setting, mechanism",
            ),
            _open(
                "Measures regarding outputs: does something lower the likelihood that queries obtain personal data?",
                "not known to a run",
            ),
            Line(
                "Analysis: can an audit by documents evaluate these measures?",
                "The card is signed, and epsilon is recomputed from its events by epsilonflow card verify, and by"
                " verify_card.py, which is one file without epsilonflow.",
                "card: events, evidence",
            ),
            _audit_line("Testing: was the method tested for membership inference?", audit),
            _open(
                "Testing: was this very model tested for attribute and membership inference, exfiltration,"
                " regurgitation of training data, model inversion and reconstruction?",
                "audits try the method on made-up records, not this model",
            ),
            _open(
                "Are both likelihoods insignificant: that personal data of those who were trained on are extracted"
                " from the model directly, probabilistic extraction included, and that queries obtain them,"
                " intentionally or not; with all means reasonably likely to be used by the controller or others?",
                "a conclusion for you, of which the facts above are a part",
            ),
            _open(
                "Documentation: is there an impact assessment, and advice of the data protection officer?",
                "not known to a run",
            ),
        ),
    )


def _ai_act(card: PrivacyCard, metrics: Metrics | None) -> Source:
    setting, mechanism = card.setting, card.mechanism
    records = "private, and not on the card" if setting.records is None else f"{setting.records:,}"
    model = f"{mechanism.model.name}, {mechanism.model.parameters:,} parameters, trained by {mechanism.algorithm}."
    ran = card.implementation
    return Source(
        "AI Act, Regulation (EU) 2024/1689, Annex IV: items on data and accuracy",
        "13 June 2024",
        "Shortened from the wording of points 1 to 4.",
        (
            _open(
                "1(a) What are the intended purpose, the provider, and the version in relation to previous ones?",
                "deployment in the data card may say so",
            ),
            Line(
                "1(c) Which versions of software are relevant?",
                f"{words.software(card)}.",
                "card: implementation",
            ),
            Line(
                "2(a) By which methods and steps was it developed, with what pre-trained systems of third parties?",
                f"{model} {words.model_parts(mechanism.model)}",
                "card: mechanism.model",
            ),
            Line(
                "2(b) What are the key design choices, and what is it designed to optimise for?",
                f"{words.features(mechanism.features)} Settings of {mechanism.algorithm}:"
                f" {', '.join(f'{name} {value}' for name, value in mechanism.settings.items()) or 'none'}.",
                "card: mechanism; plan.json",
            ),
            _open(
                "2(b) With what rationale and assumptions, with regard to which persons or groups?",
                "a run has settings, not reasons",
            ),
            Line(
                "2(c) Which computational resources were used to train and test it?",
                f"Device: {ran.device}. Python {ran.python}.",
                "card: implementation.device",
            ),
            Line(
                "2(d) Which data sets were used for training: provenance, scope and main characteristics?",
                f"{setting.title}. Source: {setting.source}. Licence: {setting.licence}."
                f" Number of records: {records}.",
                "card: setting; the data card",
            ),
            _open(
                "2(d) How were the data obtained and selected, labelled and cleaned?", "before the data card"
            ),
            _utility(
                "2(g) How was it validated and tested, on what data, by which metrics of accuracy?", metrics
            ),
            _open(
                "2(g) What are potentially discriminatory impacts?",
                "metrics of groups, which privacy.evaluation.by names, help to answer it",
            ),
            Line(
                "2(g) Where are logs and reports, dated and signed by the responsible persons?",
                "The card is signed by the owner's key; the ledger has the date of each run. A person's signature is"
                " yours to give.",
                "card: signature; the ledger",
            ),
            _groups(
                "3 What is the accuracy for specific persons or groups on which it is to be used?", metrics
            ),
            _open(
                "3 What unintended outcomes, and risks to health, safety, fundamental rights and of discrimination,"
                " are foreseeable?",
                "not known to a run",
            ),
            _open("4 Are the performance metrics appropriate for this system?", "a judgement about its use"),
        ),
    )


def _audit_line(question: str, audit: AuditSummary | None) -> Line:
    if audit is None:
        return _open(question, "no audit of the method is in this checkout; epsilonflow audit makes one")
    verdict = "refutes" if audit.is_violated else "does not refute"
    fact = (
        f"An audit of {audit.method} on made-up records {verdict} its claim: at least epsilon"
        f" {audit.epsilon_lower_bound:.3g} was found where {audit.claimed:.3g} was claimed."
    )
    return Line(question, fact, f"{audit_folder(audit.method)}/{AUDIT}, of {audit.at}")


def _utility(question: str, metrics: Metrics | None) -> Line:
    if not metrics:
        return _open(question, "no metrics.json lies beside the card")
    measured = {name: value for name, value in held_out_metrics(metrics).items() if value is not None}
    shown = "; ".join(
        f"{name.replace('_', ' ')} {format_metric(value, name)}" for name, value in measured.items()
    )
    of = private_words(metrics) if is_private(metrics) else "declared public"
    return Line(question, f"On held-out records, which are {of}: {shown or 'nothing'}.", "metrics.json")


def _groups(question: str, metrics: Metrics | None) -> Line:
    """The metric of each group that was released with the others; else what would release it."""
    shown = "; ".join(
        f"by {column}: {group_metrics(groups)}"
        for column, groups in (metrics or {}).get("groups", {}).items()
    )
    if not shown:
        return _open(question, "no metric of a group was released; privacy.evaluation.by names groups")
    return Line(question, f"Released {shown}. What that means for them is yours to say.", "metrics.json")


def page(card: PrivacyCard, artifacts: Path, root: Path) -> str:
    """The page as HTML, which prints."""
    metrics = artifacts / "metrics.json"
    asked: Sequence[Source] = sources(
        card,
        read_json(metrics) if metrics.is_file() else None,
        newest_audit(card.mechanism.algorithm, root),
    )
    made = environment(below=Path(__file__).parent)
    return made.get_template("authority.html.j2").render(
        card=card, sources=asked, must_answer=MUST_ANSWER, statement=words.statement(card)
    )

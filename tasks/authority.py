"""What whoever answers for a model is asked, beside the facts of its card, audit and metrics that answer it.

Each line has a fact and where it is, or says that you must answer. No line concludes anything in law.

Sources, and how far they were read. Regulation (EU) 2024/1689 (AI Act) of 13 June 2024, Annex IV: all points as they
are worded, shortened here. NIST SP 800-226, Guidelines for Evaluating Differential Privacy Guarantees: sections 2 to 4
of the initial public draft of 11 December 2023, and each of its privacy hazards; of the final version of March 2025 the
abstract alone. European Data Protection Board, Opinion 28/2024 on certain data protection aspects related to the
processing of personal data in the context of AI models, 17 December 2024: its executive summary, paragraphs 43 and 55
as quoted elsewhere, and a summary of section 3.2.2. What was not read word for word is a paraphrase, and the page says
so.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from algorithms.privacy.card import PrivacyCard
from algorithms.privacy.card import text as words
from data.card import data_card
from data.deployment import Deployment
from tasks.reporting import AUDIT, AuditSummary, audit_folder, environment, newest_audit
from tasks.runs.metrics import format_metric, group_metrics, held_out_metrics, metric_words, private_words
from tasks.runs.metrics_document import Metrics, is_private, read_metrics

MUST_ANSWER = "You must answer."
THREATS = "docs/threat-model.md of epsilonflow"

DECLARED = (
    "They are those that are declared, and the pipeline computes none from the records without noise. That whoever"
    " declared them did not look either is for you to say."
)


@dataclass(frozen=True)
class Line:
    """A question, the fact that answers it, or None, and where the fact is; or why none is there."""

    question: str
    fact: str | None
    where: str


@dataclass(frozen=True)
class Source:
    """A document that asks. wording: how near to it the questions are."""

    title: str
    published: str
    wording: str
    lines: tuple[Line, ...]


def sources(
    card: PrivacyCard,
    metrics: Metrics | None,
    audit: AuditSummary | None,
    deployed: Deployment | None = None,
) -> tuple[Source, ...]:
    """The questions of each document with what the run's documents say. deployed: of the data card."""
    return (
        Source(
            "NIST SP 800-226, Guidelines for Evaluating Differential Privacy Guarantees",
            "March 2025",
            "Paraphrased after sections 2 to 4 of the initial public draft of 11 December 2023, which were read whole,"
            " each hazard included, and whose numbers these are. Of the final version the abstract was read, so its"
            " numbers and words may be others.",
            (*_nist_guarantee(card), *_nist_algorithms(card, metrics), *_nist_deployment(card, audit)),
        ),
        Source(
            "EDPB Opinion 28/2024, section 3.2.2: what is considered where a model is claimed to be anonymous",
            "17 December 2024",
            "Paraphrased after the executive summary, quotations of paragraphs 43 and 55, and a public summary of"
            " section 3.2.2. The whole text of sections 3.2.2 and 3.2.3 was not read, so a question may be missing.",
            _edpb(card, audit),
        ),
        Source(
            "AI Act, Regulation (EU) 2024/1689, Annex IV: technical documentation",
            "13 June 2024",
            "Shortened from the wording of points 1 to 9, each of which is here.",
            (
                *_ai_act_system(card, deployed),
                *_ai_act_development(card),
                *_ai_act_validation(metrics),
                *_ai_act_use(metrics),
            ),
        ),
    )


def _open_question(question: str, why: str) -> Line:
    return Line(question, None, why)


def _nist_guarantee(card: PrivacyCard) -> tuple[Line, ...]:
    setting, change = card.setting, {"ADD_OR_REMOVE_ONE": "added or removed", "REPLACE_ONE": "replaced"}
    return (
        Line("2.2 What is epsilon?", words.statement(card), "card: setting, accounting.epsilon"),
        _open_question(
            "2.2 Does this value of epsilon still give meaningful privacy in this use?",
            "a judgement about people and harm, which no run makes",
        ),
        Line(
            "2.2 What do all analyses of the same data cost together, choices of settings included?",
            f"{words.population(card)} Trying out settings: {words.tuning(card)}",
            "card: accounting, events; the ledger",
        ),
        Line(
            "2.3 Of which variant is it, and are all parameters given, so that others can convert it?",
            f"Epsilon is stated at delta {setting.delta:g}. Each release is an event on the card, from which other"
            " variants and epsilons at other deltas follow.",
            "card: setting.delta, events, accounting.epsilon",
        ),
        Line(
            "2.4 What is the unit of privacy: a person, or single records and events?",
            words.protection_sentence(card),
            "card: setting.unit, setting.adjacency",
        ),
        Line(
            "2.4 Which differences between two situations does the unit leave out?",
            " ".join(words.not_protected(card)),
            "card: setting, mechanism",
        ),
        Line(
            "2.5 With which guarantees may it be compared?",
            f"With those of the same delta, {setting.delta:g}, and the same unit, {words.unit_in_words(card)},"
            f" {change[setting.adjacency]}.",
            "card: setting.delta, setting.unit, setting.adjacency",
        ),
        Line(
            "2.6 Did the run release anything beside the model?",
            words.holdout(card),
            "card: setting.holdout",
        ),
        _open_question(
            "2.6 Is anything else released from the same data, without differential privacy?",
            "the ledger has its own releases alone",
        ),
    )


def _nist_algorithms(card: PrivacyCard, metrics: Metrics | None) -> tuple[Line, ...]:
    mechanism, accounting = card.mechanism, card.accounting
    noise = " and ".join(sorted({f"{query.noise} noise" for query in mechanism.queries}))
    return (
        Line(
            "3 and 3.1 Was a well-tested library used, and which mechanisms?",
            f"{words.software(card)}, whose mechanisms are its own: {noise}. Epsilon is computed by"
            f" {accounting.library} {accounting.library_version}.",
            "card: implementation, mechanism.queries, accounting.library",
        ),
        _utility("3.2 How accurate is what is released?", metrics),
        _open_question(
            "3.2 Is it useful for its purpose?", "accuracy is no measure of that; see the line above"
        ),
        _groups(
            "3.3.1 Does it magnify or create systemic bias? What is measured of groups, of which small ones lose most?",
            metrics,
        ),
        _open_question(
            "3.3.2 Were measures against human bias, such as rounding, weighed?", "not known to a run"
        ),
        _open_question(
            "3.3.3 How large is the statistical bias of clipping and of processing afterwards?",
            "the card has the bounds, in mechanism.queries; a run does not measure what they cost",
        ),
        Line(
            "3.4 Were bounds and the cells of histograms given without looking at the data?",
            words.FROM_RECORDS if mechanism.settings_from_records else DECLARED,
            "card: mechanism.settings_from_records; the data card",
        ),
        Line(
            "3.5 Is the training itself protected, as models memorise, and how simple is the model?",
            f"Trained by {mechanism.algorithm} in {mechanism.releases:,} releases with {noise};"
            f" {mechanism.model.parameters:,} parameters.",
            "card: mechanism.algorithm, mechanism.releases, mechanism.model",
        ),
        Line("3.6 Are synthetic data generated with differential privacy?", "None are generated.", "a model"),
        _open_question(
            "3.7 Of texts, images and other unstructured data: is it clear whose data a record is?",
            "a run knows records, not who appears in them",
        ),
    )


def _nist_deployment(card: PrivacyCard, audit: AuditSummary | None) -> tuple[Line, ...]:
    ran = card.implementation
    return (
        Line(
            "4.1 Are data released once, or queries answered?",
            "Released once: nobody asks queries of the records."
            f" {words.COMPOSITION[card.accounting.composition.kind]}",
            "card: mechanism.queries, accounting.composition",
        ),
        Line(
            "4.2 Who is trusted?",
            "The central model: the curator, the machine and the code that ran are trusted, and whoever sees what is"
            " released is not.",
            THREATS,
        ),
        _open_question("4.2 Does that hold in the real world?", "not known to a run"),
        Line(
            "4.3 Is floating-point arithmetic covered?",
            f"{words.noise(card)}. {words.software(card)}. {words.rounding(ran.rounding, ran.device)}",
            "card: implementation; recomputed by verify_card.py",
        ),
        _audit_line("4.3 Was the implementation tested against its claim?", audit),
        Line(
            "4.3 Do running times, errors or other side channels reveal records?",
            words.side_channels(card),
            f"card: implementation; {THREATS}",
        ),
        _open_question(
            "4.4 How are the raw data secured, at rest and while computing?", "outside of training"
        ),
        _open_question("4.4 Who has access to them, and to their keys?", "outside of training"),
        _open_question("4.5 Need these data be collected at all, and could less do?", "before the data card"),
    )


def _edpb(card: PrivacyCard, audit: AuditSummary | None) -> tuple[Line, ...]:
    return (*_edpb_on_training(card), *_edpb_on_the_model(audit))


def _edpb_on_training(card: PrivacyCard) -> tuple[Line, ...]:
    setting = card.setting
    return (
        Line(
            "Selection of sources: from which are the training data?",
            f"{setting.title}; {setting.source}",
            "card: setting.source",
        ),
        _open_question(
            "Selection of sources: by which criteria, are they relevant and adequate, were inappropriate ones left out,"
            " and was collecting personal data avoided or limited?",
            "before the data card",
        ),
        Line(
            "Data preparation: how were records prepared?",
            words.transform(card.mechanism),
            "card: mechanism.transform; the data card",
        ),
        _open_question(
            "Data preparation and minimisation: could anonymous or pseudonymised data do, was less used, and were"
            " irrelevant data filtered out?",
            "the data card lists columns, not reasons",
        ),
        Line(
            "Methodological choices: which privacy-preserving methods were used?",
            words.statement(card),
            "card: setting, events",
        ),
        Line(
            "Methodological choices: who or what is left out of that, and which settings reduce overfitting?",
            f"{' '.join(words.not_protected(card))} {_settings(card)}",
            "card: setting, mechanism.settings",
        ),
    )


def _edpb_on_the_model(audit: AuditSummary | None) -> tuple[Line, ...]:
    return (
        _open_question(
            "Measures regarding outputs: does something lower the likelihood that queries obtain personal data?",
            "not known to a run",
        ),
        Line(
            "Analysis: can an audit by documents evaluate these measures?",
            "The card is signed, and epsilon is recomputed from its events by epsilonflow card verify, and by"
            " verify_card.py, which is one file without epsilonflow. Which internal or external audits did so is yours"
            " to add.",
            "card: events, evidence",
        ),
        _audit_line("Testing: was the method tested for membership inference?", audit),
        _open_question(
            "Testing: was this very model tested for attribute and membership inference, exfiltration, regurgitation"
            " of training data, model inversion and reconstruction?",
            "audits try the method on made-up records, not this model; a test speaks for the attacks that it tried",
        ),
        _open_question(
            "Are both likelihoods insignificant for anyone: that personal data of those who were trained on are"
            " extracted from the model directly, probabilistic extraction included, and that queries obtain them,"
            " intentionally or not; with all means reasonably likely to be used by the controller or others?",
            "a conclusion for you, of which the facts above are a part",
        ),
        _open_question(
            "Documentation: is there an impact assessment, and advice of the data protection officer?",
            "not known to a run",
        ),
    )


def _settings(card: PrivacyCard) -> str:
    """The method's settings in a sentence."""
    one_by_one = dict[str, object]()
    for name, value in card.mechanism.settings.items():
        one_by_one |= value if isinstance(value, dict) else {name: value}
    shown = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in one_by_one.items())
    return f"Settings of {card.mechanism.algorithm}: {shown or 'none'}."


def _ai_act_system(card: PrivacyCard, deployed: Deployment | None) -> tuple[Line, ...]:
    question = (
        "1(a) What are the intended purpose, the provider, and the version in relation to previous ones?"
    )
    purpose = _open_question(question, "deployment in the data card may say so")
    if deployed is not None:
        version = f"Version: run {card.evidence.run_id}; its relation to previous ones is yours to add."
        stated = f"Purpose: {deployed.use}. Provider: {', '.join(deployed.curators)}. {version}"
        purpose = Line(question, stated, "deployment in the data card; card: evidence.run_id")
    return (
        purpose,
        _open_question(
            "1(b) How does it interact with hardware, software and other AI systems?", "outside of training"
        ),
        Line(
            "1(c) Which versions of software are relevant?",
            f"{words.software(card)}.",
            "card: implementation",
        ),
        _open_question(
            "1(c) and 1(d) What do updates require, and in which forms is it placed on the market?",
            "epsilonflow export and release write forms; which one is used is not known to a run",
        ),
        _open_question(
            "1(e) to 1(h) On what hardware is it to run, what do its product and its interface look like, and what are"
            " the instructions for use?",
            "not known to a run",
        ),
    )


def _ai_act_development(card: PrivacyCard) -> tuple[Line, ...]:
    """Points 2(a) to 2(d) of Annex IV."""
    setting, mechanism, ran = card.setting, card.mechanism, card.implementation
    records = "private, and not on the card" if setting.records is None else f"{setting.records:,}"
    model = f"{mechanism.model.name}, {mechanism.model.parameters:,} parameters, trained by {mechanism.algorithm}."
    return (
        Line(
            "2(a) By which methods and steps was it developed, with what pre-trained systems of third parties?",
            f"{model} {words.model_parts(mechanism.model)}",
            "card: mechanism.model",
        ),
        Line(
            "2(b) What are the key design choices and the relevant parameters?",
            f"Transform: {words.transform(mechanism)} Learned features: {words.features(mechanism.features)}"
            f" {_settings(card)}",
            "card: mechanism; plan.json",
        ),
        _open_question(
            "2(b) What is it to optimise for, with what output, rationale, assumptions and trade-offs, for which"
            " persons or groups?",
            "a run has settings, not reasons",
        ),
        Line(
            "2(c) Which computational resources were used to train and test it?",
            f"Device: {ran.device}. Python {ran.python}.",
            "card: implementation.device",
        ),
        _open_question(
            "2(c) How do components of software build on each other?", "of the whole system; see 2(a)"
        ),
        Line(
            "2(d) Which data sets were used for training: provenance, scope and main characteristics?",
            f"{setting.title}. Source: {setting.source}. Licence: {setting.licence}."
            f" Number of records: {records}.",
            "card: setting; the data card",
        ),
        _open_question(
            "2(d) How were the data obtained and selected, labelled and cleaned?", "before the data card"
        ),
    )


def _ai_act_validation(metrics: Metrics | None) -> tuple[Line, ...]:
    """Points 2(e) to 2(h) of Annex IV."""
    return (
        _open_question(
            "2(e) Which human oversight is needed, and what helps to interpret outputs?", "not known to a run"
        ),
        _open_question(
            "2(f) Which changes are determined in advance, such as training again each week?", "your schedule"
        ),
        _utility(
            "2(g) How was it validated and tested, on what data, by which metrics of accuracy?", metrics
        ),
        _open_question(
            "2(g) What are potentially discriminatory impacts?",
            "metrics of groups, which privacy.evaluation.by names, help to answer it",
        ),
        Line(
            "2(g) Where are logs and reports, dated and signed by the responsible persons?",
            "The card is signed by the owner's key; the ledger has the date of each run. A person's signature is"
            " yours to give.",
            "card: signature; the ledger",
        ),
        _open_question(
            "2(h) Which measures of cybersecurity are in place?",
            "outside of training; see side channels above",
        ),
    )


def _ai_act_use(metrics: Metrics | None) -> tuple[Line, ...]:
    return (
        _groups("3 What is the accuracy for specific persons or groups on which it is to be used?", metrics),
        _open_question(
            "3 What unintended outcomes, and risks to health, safety, fundamental rights and of discrimination,"
            " are foreseeable?",
            "not known to a run",
        ),
        _open_question(
            "3 Which human oversight is in place, and what must input data be?",
            "the data card, and the inputs of an ONNX export, list the columns",
        ),
        _open_question(
            "4 Are the performance metrics appropriate for this system?", "a judgement about its use"
        ),
        _open_question("5 What is the risk management system (Article 9)?", "not known to a run"),
        _open_question(
            "6 What was changed through its lifecycle?", "the ledger has each run on these people"
        ),
        _open_question(
            "7 Which harmonised standards, or what in their place, were applied?", "not known to a run"
        ),
        _open_question("8 Where is the EU declaration of conformity (Article 47)?", "not known to a run"),
        _open_question("9 How is it evaluated after it is on the market (Article 72)?", "not known to a run"),
    )


def _audit_line(question: str, audit: AuditSummary | None) -> Line:
    if audit is None:
        return _open_question(
            question, "no audit of the method is in this checkout; epsilonflow audit makes one"
        )
    verdict = "refutes" if audit.is_violated else "does not refute"
    fact = (
        f"An audit of {audit.method} on made-up records {verdict} its claim: at least epsilon"
        f" {audit.epsilon_lower_bound:.3g} was found where {audit.claimed:.3g} was claimed."
    )
    return Line(question, fact, f"{audit_folder(audit.method)}/{AUDIT}, of {audit.at}")


def _utility(question: str, metrics: Metrics | None) -> Line:
    if not metrics:
        return _open_question(question, "no metrics.json lies beside the card")
    measured = {name: value for name, value in held_out_metrics(metrics).items() if value is not None}
    shown = "; ".join(
        f"{metric_words(name)} {format_metric(value, name)}" for name, value in measured.items()
    )
    of = private_words(metrics) if is_private(metrics) else "declared public"
    return Line(question, f"On held-out records, which are {of}: {shown or 'nothing'}.", "metrics.json")


def _groups(question: str, metrics: Metrics | None) -> Line:
    """The metric of each group that was released with the others; else what would release it."""
    by_column = metrics.get("groups", {}) if metrics is not None and is_private(metrics) else {}
    shown = "; ".join(f"by {column}: {group_metrics(groups)}" for column, groups in by_column.items())
    if not shown:
        return _open_question(
            question, "no metric of a group was released; privacy.evaluation.by names groups"
        )
    return Line(question, f"Released {shown}. What that means for them is yours to say.", "metrics.json")


def page(card: PrivacyCard, artifacts: Path, root: Path) -> str:
    """The page as HTML, which prints."""
    metrics, cards, name = artifacts / "metrics.json", root / "data/cards", card.setting.dataset
    source_list: Sequence[Source] = sources(
        card,
        read_metrics(metrics) if metrics.is_file() else None,
        newest_audit(card.mechanism.algorithm, root),
        data_card(name, cards).deployment if (cards / f"{name}.yaml").is_file() else None,
    )
    templates = environment(below=Path(__file__).parent)
    return templates.get_template("authority.html.j2").render(
        card=card, sources=source_list, must_answer=MUST_ANSWER, statement=words.statement(card)
    )

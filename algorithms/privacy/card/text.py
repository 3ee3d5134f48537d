"""The sentences of a privacy card, for people: written from its facts, and never read back."""

import json
from collections.abc import Callable
from contextlib import suppress

from algorithms.errors import RefusedError
from algorithms.plain_text import for_markdown
from algorithms.privacy.accounting import Budget, rounded_up
from algorithms.privacy.accounting.correlated import CorrelatedDpEvent, releases_of
from algorithms.privacy.accounting.epsilon import adjacency_named, rare_reading_chance
from algorithms.privacy.accounting.events import releases_in_order, trials_of
from algorithms.privacy.card.schema import (
    EVALUATION,
    FeaturesSection,
    MechanismSection,
    ModelSection,
    PrivacyCard,
    Rounding,
    Setting,
    words_by,
)
from algorithms.privacy.ledger import Composition, group_of

STARTED = (
    "The model starts from a file and may keep all of it: what that was trained on is not in this card, and its own"
    " cost and its own people count, too."
)
DIAGNOSED = "Diagnostics were computed from the records and are shown without noise; no such run is private."
FROM_RECORDS = (
    "A setting was computed from the private records and no noise covers it: the stated epsilon does not hold, and the"
    " run is only good to reproduce a publication."
)
SO_FAR = (
    "Releases were chosen adaptively: an epsilon so far is what those up to a step add up to. No theorem makes it the"
    " cost of a run that is ended there because of what was seen; what holds is the epsilon of the whole filter."
)
NOTHING_LEARNED = "Nothing was learned from the records before training."
TRANSFORMS = {
    "none": (
        "Nothing but reading: each record by itself is held to what is declared of it, such as bounds, categories and"
        " sizes, and encoded as numbers, which is free."
    ),
    "scattering": "Scattering coefficients of each image, a fixed transform of each record by itself, which is free.",
    "encoder": (
        "The {width} features that the frozen public encoder {name} makes of each record by itself, which is free. Its"
        " weights have the SHA-256 {sha256}; it was pretrained on {pretrained_on}, whose people this run does"
        " not protect."
    ),
}
TOKENS = (
    "The first {width} tokens of each text by the public {name}, which is free. Its vocabulary has the SHA-256"
    " {sha256}; it was made of {pretrained_on}, whose people this run does not protect."
)
COMPOSITION = {
    "schedule": "The releases were fixed before the first one, so both accountants apply to them as a whole.",
    "zcdp": (
        "Releases were chosen adaptively, under a zCDP filter whose rho was fixed before the first one; the epsilon is"
        " that of the whole rho, also where less was used."
    ),
    "renyi": (
        "Releases were chosen adaptively, under a Rényi filter whose order and limit were fixed before the first one;"
        " the epsilon is that of the whole limit, also where less was used."
    ),
}
UNKEPT = (
    "No ledger kept this run, and nobody was charged for it: whoever trains on the same records again has to add up the"
    " costs by hand."
)
HOLDOUT = {
    "none": "The run measured nothing on held-out records.",
    "public": (
        "The model was measured on held-out records that the data card declares public. They were not trained on, and"
        " nothing here protects them."
    ),
    "private": (
        "One noised histogram of the model's scores on the held-out records was released, and all metrics follow from"
        " it. Its people are protected, too, at epsilon {epsilon} and the same delta. {price}"
    ),
}
_OTHER_SIDE = (
    " Without a column that names the person, a row that was corrected can be of the other side later, and its person"
    " then pays for both. A row that equals one of the other side may lose what is lost there."
)
_PRICES = {
    "ADD_OR_REMOVE_ONE": "They are other people than those trained on, so the run costs the larger of the two.",
    "REPLACE_ONE": "A record that is replaced may be of either side, so the run costs both together.",
}
NOT_EVALUATED = "The held-out records are private, and nothing of them was released."
TUNING = (
    "Not part of this run's epsilon. Every run that was tried on this population is charged to its ledger on its own;"
    " settings that were chosen by looking at these records elsewhere are charged nowhere."
)
_GENERATORS = {
    "secure": "AES-256 in counter mode, key from the operating system",
    "seeded": "AES-256 in counter mode, seeded key, known to anyone: NOT private",
}
_CHANGE = {"ADD_OR_REMOVE_ONE": "added or removed", "REPLACE_ONE": "replaced by another"}
_WITHOUT_RECORD = {"ADD_OR_REMOVE_ONE": "without it", "REPLACE_ONE": "with any other record in its place"}


def statement(card: PrivacyCard) -> str:
    """The promise in a sentence or two; what takes from it is said in any case."""
    setting, mechanism, cost = card.setting, card.mechanism, card.cost
    numbers = "" if cost is None else f"epsilon = {rounded_up(cost)} and delta = {setting.delta:g}"
    is_started = mechanism.model.start is not None
    if setting.private:
        changed = f"when {unit_in_words(card)} is {_CHANGE[setting.adjacency]}{_group(card)}"
        beside = (
            "; what it cost to make the model that this one starts from is not in that number, and whoever was in both"
            " trainings loses both together"
        )
        return f"Differential privacy with {numbers}, {changed}{beside if is_started else ''}."
    sentences = {
        "none": ["the model was trained without noise and may give away the records it was trained on."],
        "seeded": ["the noise came from a seeded generator, so that anyone can compute it and take it away."],
    }.get(setting.guarantee, [])
    sentences += [FROM_RECORDS] if mechanism.settings_from_records else []
    sentences += [DIAGNOSED] if mechanism.diagnostics else []
    if cost is not None and not mechanism.settings_from_records:
        sentences += [
            f"With secret noise and nothing shown beside it the same releases would have had {numbers}."
        ]
    sentences += [STARTED] if is_started else []
    return f"NOT PRIVATE: {' '.join(sentences)}"


def unit_in_words(card: PrivacyCard) -> str:
    """What is added or removed."""
    setting = card.setting
    match setting.per_person:
        case None:
            return f"one record ({_unit(setting)})"
        case 1 if card.accounting.blocks is not None:
            return f"what one person has in one block ({setting.unit}), of whose records there {_rows_used(setting)},"
        case 1:
            unit = "" if setting.unit == "one person" else f" ({setting.unit})"
            return f"one person{unit}, of whose records {_rows_used(setting)},"
        case max_rows:
            return f"one of the at most {max_rows} records of a person ({setting.unit})"


def _unit(setting: Setting) -> str:
    """What one record is, and whether that is only said so."""
    stated = ", as whoever trained it states: nobody checked that none has several records"
    return f"{setting.unit}{stated if setting.unit_is_stated else ''}"


def _rows_used(setting: Setting) -> str:
    """How many records of a person were used."""
    if setting.rows_per_user is not None:
        return f"{setting.rows_per_user} were used at most, together as one"
    return "one was used at most" if setting.per_person == 1 else f"{setting.per_person} were used at most"


def _group(card: PrivacyCard) -> str:
    """What all records of a person cost together, where they may be several: Dwork and Roth 2014, Theorem 2.2."""
    max_rows, cost = card.setting.per_person or 1, card.cost
    if max_rows == 1 or cost is None:
        return ""
    together = group_of(Budget(cost, card.setting.delta), max_rows)
    numbers = f"epsilon = {rounded_up(together.epsilon)} and delta = {rounded_up(together.delta)}"
    return f"; for all records of a person together it is {numbers}, and the account is charged for them all"


def protection_sentence(card: PrivacyCard) -> str:
    """Who is protected, and from what."""
    setting, is_started = card.setting, card.mechanism.model.start is not None
    shown = "who was in its training data is shown by it as far as its own card says"
    if not setting.private:
        return f"Nobody.{f' Of the start: {shown}.' if is_started else ''}"
    start = (
        f" Except for the model that it starts from: {shown}, and who was in both trainings by both together. The"
        " account of the population has the sum, where both were charged to it."
    )
    data = "data, held-out records included," if setting.holdout == "private" else "training data"
    who = f"Whoever contributed one record ({_unit(setting)}) to the {data}".rstrip(",")
    if setting.per_person is not None:
        where = f"Whoever contributed records ({setting.unit}) to the {data}".rstrip(",") + ", of whose own"
        if card.accounting.blocks is not None:
            where = f"What one person ({setting.unit}) has in one block of the {data}".rstrip(",")
            where += ", of whose records there"
        who = f"{where} {_rows_used(setting)}, chosen by a keyed hash of each"
    return (
        f"{who}: all that was released would have looked nearly the same {_WITHOUT_RECORD[setting.adjacency]},"
        f" whatever else an attacker knows and can compute.{start if is_started else ''}"
    )


def not_protected(card: PrivacyCard) -> list[str]:
    """Who and what is not protected."""
    setting, sentences = card.setting, []
    if setting.public_records:
        sentences.append("The records themselves, which the data card declares public.")
    if card.mechanism.model.start is not None:
        sentences.append(
            "Whoever was in the training data of the model that this one starts from, whether or not the records of"
            " this run are public: what protects them is in the card of that model."
        )
    what = "training records" if setting.rows_per_user is None else "people trained on"
    number = (
        "The bound on the number of records that the data card states; the number itself is private."
        if setting.records is None
        else f"The number of {what}, {setting.records}, which the data card declares public."
    )
    several = (
        f"Whoever contributed several records: protected is {setting.unit}, and k of them together only at"
    )
    if setting.per_person is not None:
        several = "Several people together, such as a family: k of them only at"
        if card.accounting.blocks is not None:
            several = "One person in k blocks, or k people together, such as a family: only at"
    if setting.private:
        sentences.append(f"{several} an epsilon of up to k times as much and a far larger delta.")
        sentences += filter(None, [rare_reading(card)])
    return [
        *sentences,
        "What holds for people in general: it can be learned without any single record, and then applies to everybody.",
        *(["The held-out records."] if setting.holdout != "private" else []),
        number,
    ]


def rare_reading(card: PrivacyCard) -> str | None:
    """That delta covers part of the records that are read, or all of them; None where it is negligible beside these."""
    delta, adjacency = card.setting.delta, adjacency_named(card.setting.adjacency)
    chance = None
    with suppress(RefusedError):  # of a card that does not hold
        chance = rare_reading_chance(card.schedule, delta, adjacency)
    if chance is None:
        return None
    share = f"{min(1.0, delta / chance):.0%}"
    return (
        f"A record that is read: that happens to any one with a chance of about {chance:.2g} at most, and delta,"
        f" {delta:g}, is {share} of that. A mechanism that publishes {share} of the records that it reads could keep"
        " the same promise."
    )


def holdout(card: PrivacyCard) -> str:
    """What was measured on held-out records, and what protects them."""
    setting = card.setting
    if setting.holdout == "private" and EVALUATION not in card.evidence.files:
        return NOT_EVALUATED
    why = f" Why they are public: {setting.holdout_why}" if setting.holdout_why else ""
    price = _PRICES[setting.adjacency] + ("" if setting.per_person else _OTHER_SIDE)
    return HOLDOUT[setting.holdout].format(epsilon=_number(setting.evaluation_epsilon), price=price) + why


def side_channels(card: PrivacyCard) -> str:
    """What the promise leaves out."""
    hidden = (
        "Losses, gradient norms and batch sizes without noise were neither logged nor kept after the run."
    )
    shown = "Norms of gradients without noise were stored, as diagnostics."
    return (
        "Side channels: how long training took, its memory and power use, and access to the machine that held the"
        f" records. {shown if card.mechanism.diagnostics else hidden}"
    )


def owner_must(card: PrivacyCard) -> list[str]:
    """What the promise needs from the owner of the data."""
    started = card.mechanism.model.start is not None
    if card.setting.private:
        last = "Decide whether this epsilon is small enough for these people; no number decides that for you."
        start = " Decide it for the people in the start, too: whoever gets this model gets what that one gives away."
    else:
        last = "Publish nothing of this run unless the records themselves are public."
        start = (
            " Publish nothing of it either unless the model that it starts from may be published: what that was trained"
            " on is not in this card, and its own card, its cost and its people count, too."
        )
    unit = (
        f"See to it that one record is what has to be protected ({card.setting.unit}), and that nobody contributed more"
        " of them than that."
    )
    if card.setting.per_person is not None:
        unit = f"See to it that the person's column has one name for each person ({card.setting.unit}) and no other."
    return [
        unit,
        "Charge all data sets that hold the same people to one population, and count releases made elsewhere.",
        "Declare classes, categories, bounds and shapes in the data card without looking at the private records.",
        "Keep the ledger, never put an older copy of it back, and keep this card's ledger_head outside of it.",
        "Keep the owner key to yourself, and give its public half to whoever is to check this card.",
        "Keep the records, the prepared data and the folders of unfinished runs from everybody else.",
        last + (start if started else ""),
    ]


READER = (
    "Records were read by code of the data's owner, who declares that it reads each record by itself. That was not"
    " checked: where one record changes what is read of another, this card does not hold."
)


def contact(card: PrivacyCard) -> str:
    """Whom to ask, as far as the data card says."""
    return f"The data card names no person; it names this source: {card.setting.source}"


def transform(mechanism: MechanismSection) -> str:
    """What was made of each record by itself."""
    if mechanism.encoder is None:
        return TRANSFORMS[mechanism.transform]
    on = mechanism.encoder.pretrained_on
    encoder_words = mechanism.encoder.model_dump() | {
        "pretrained_on": "data that are unknown" if on == "unknown" else on
    }
    return (TRANSFORMS["encoder"] if mechanism.encoder.tokens is None else TOKENS).format(**encoder_words)


def tuning(card: PrivacyCard) -> str:
    """Whether the price has the choice of settings in it."""
    trials = trials_of(card.schedule)
    if trials is None:
        return TUNING
    what = "The cost is that of a whole search, of which this model is the winner"
    return f"{what}; a trial had one of {len(trials)} settings."


def paper_protocol(mechanism: MechanismSection) -> str | None:
    """The settings of a paper's protocol, and what is otherwise; None where the run has none."""
    protocol = mechanism.paper_protocol
    if protocol is None:
        return None
    settings = ", ".join(f"{name} {json.dumps(value)}" for name, value in protocol.settings.items())
    departures = f"; not the paper's: {_join_names(protocol.departures)}" if protocol.departures else ""
    return f"by {protocol.paper}: {settings}{departures}"


def selection(mechanism: MechanismSection) -> str | None:
    """How far a noisy choice among candidates is from a uniform draw; None where nothing is chosen by noisy losses."""
    law = mechanism.selection_law
    if law is None:
        return None
    noise = (
        f"one of {law.candidates} candidates by noise of scale {law.noise_scale:,.4g} on their total losses"
    )
    if law.gain is None or law.distance is None:
        return (
            f"{noise}; how far that is from a uniform draw depends on the number of records, which is private"
        )
    return (
        f"{noise}; where the best lies {law.gain:,.4g} below all others, the mean that a choice can gain at most, the"
        f" choice is {law.distance:.2g} away from a uniform draw in total variation (0 is a coin's toss)"
    )


def features(learned: FeaturesSection) -> str:
    """What was learned before training."""
    if learned.name == "none":
        return NOTHING_LEARNED
    settings = ", ".join(f"{name}: {value}" for name, value in learned.settings.items())
    described = f"{learned.name} ({settings})" if settings else learned.name
    return f"{described}: learned from the records by noised releases, which are charged with the others."


def model_parts(model: ModelSection) -> str:
    """What a model is made of."""
    start = f"Initialised by the architecture's own rule from seed {model.seed}"
    if model.start is not None:
        start = f"Starts from the file with SHA-256 {model.start}"
    sentences = [
        f"{start}{f', except {_join_names(model.reinitialize)}, from the seed' if model.reinitialize else ''}."
    ]
    sentences += [f"{name}: the file with SHA-256 {checksum}." for name, checksum in model.files.items()]
    sentences += [
        f"Not trained: {_join_names(model.frozen)}." if model.frozen else "Every parameter is trained."
    ]
    sentences += (
        [f"Each gradient is the mean over {model.augmentations} views of a record."]
        if model.augmentations > 1
        else []
    )
    return " ".join(sentences)


def software(card: PrivacyCard) -> str:
    """What trained."""
    ran = card.implementation
    return "not recorded" if ran.code is None else f"epsilonflow {ran.version}, code {ran.code}"


def noise(card: PrivacyCard) -> str:
    """Where the noise comes from."""
    return _GENERATORS[card.implementation.noise]


def correlation(card: PrivacyCard) -> str | None:
    """How the noise of steps hangs together, and what the whole run then costs like; None where it does not."""
    for event, _ in releases_in_order(card.schedule):
        if isinstance(event, CorrelatedDpEvent):
            return _correlation_text(event)
    return None


def _correlation_text(event: CorrelatedDpEvent) -> str:
    if event.leaves:
        how = f"the nodes of binary trees over {event.leaves} steps each are noised, and sums made of them"
    else:
        pairs = zip(event.weights, event.decays, strict=True)
        sums = " + ".join(f"{weight:.6g} * {decay:.6g}^(i-1)" for weight, decay in pairs)
        form = (
            f"is ({', '.join(f'{c:.6g}' for c in event.coefficients)})"
            if event.coefficients
            else f"is 1, then the sum of {sums} at distance i from the diagonal"
        )
        how = (
            "it is C^-1 W for independent normal rows of W, where C is lower triangular with equal entries along its"
            f" diagonals and its first column {form}"
        )
    turn = (
        "takes part in each of them"
        if event.rate == 1
        else f"takes part in each of them with a chance of {event.rate:.6g}"
    )
    (inner, count) = releases_of(event)
    return (
        f"Correlated over {event.steps} steps: {how}. A record belongs to one of {event.parts} parts by a coin of the"
        f" run, whose steps come in turn, and {turn}. The whole run was charged with its first step and costs like"
        f" {count} times {inner}."
    )


def rounding(stated: Rounding | None, device: str) -> str:
    """What the arithmetic does to the guarantee, and what is left open; device: that computed the sums."""
    if stated is None:
        return "No noise was added, so there is nothing to protect from rounding."
    return (
        "A noised sum is rounded to a grid whose step is a power of two at most"
        f" 2^-{stated.grid_bits} of the noise, and the noise is a whole number of these steps, so that which values can"
        " occur does not depend on the data; the noise is raised by what rounding adds to the sensitivity."
        f" Contributions are added up in {stated.sum_bits} bits. Left open: that a draw is computed in 64-bit floating"
        f" point, which changes how likely each value is, of Laplace noise within {stated.laplace_scales} scales by"
        f" less than one part in 2^{stated.laplace_error_bits}, and is in no epsilon and no delta; that a record's own"
        " contribution, computed in 32 bits or fewer, does not depend on the records beside it is tested on a CPU with"
        " one thread and with two, which are the most that a run uses, and not proven"
        + (
            "."
            if device == "cpu"
            else f"; this run computed on the device {device}, where it may in its last bits."
        )
    )


def across_runs(rule: Composition) -> str:
    """How the runs on one account add up."""
    shown = (
        ", each from the run's events; an epsilon is that of its own sum at the cap's delta, so that spent and"
        " remaining need not add up to the cap"
    )
    added = {
        "basic": "The epsilons and the deltas of all runs add up (basic composition)",
        "zcdp": f"The rho of all runs add up (zCDP){shown}",
        "renyi": f"The Rényi divergences of order {rule.order} of all runs add up{shown}",
    }
    return f"{added[rule.kind]}. The ledger refuses a run that would take a sum above its cap."


def population(card: PrivacyCard) -> str:
    """What all runs on the population may spend together."""
    each = (
        " That holds in each block by itself; the numbers here are those of the block of which the greatest share is"
        " charged."
    )
    by_block = each if card.accounting.blocks is not None else ""
    added = (
        UNKEPT
        if card.evidence.ledger_head is None
        else f"{across_runs(card.accounting.across_runs)}{by_block}"
    )
    return f"{added} This card states the cost of one run."


def block_unit(card: PrivacyCard) -> str:
    """Whom the numbers of a block protect."""
    count, unit = card.accounting.blocks.blocks_per_person if card.accounting.blocks else 1, card.setting.unit
    if count == 1:
        what = "one record" if card.setting.per_person is None else "what one person has"
        return (
            f"Protected is {what} ({unit}) in one block: it lies in no other, so it loses what was spent on its block"
            " and nothing to the others."
        )
    return (
        f"Protected is one person with records ({unit}) in at most {count} blocks: every charge is multiplied by"
        f" {count}, so that all records of the person together lose no more than the largest number among the"
        " person's blocks. The run's own epsilon is that of one record."
    )


def signature(card: PrivacyCard) -> str:
    """Who signed."""
    if card.signature is None:
        return "Not signed: whoever has this card can change it."
    key = card.signature.public_key
    return f"Signed with the owner's key whose public half is {key}; verifying the card checks the signature."


def markdown(card: PrivacyCard, *, escape: Callable[[str], str] = for_markdown) -> str:
    """The whole card in sentences, as Markdown; its facts are the file itself.

    escape: what makes a sentence safe; `str` for a reader who sees the page as it is written, as at a terminal.
    """
    setting, mechanism, accounting = card.setting, card.mechanism, card.accounting
    every, account = accounting.epsilon.model_dump(), accounting.population
    costs = {name: cost for name, cost in every.items() if cost is not None} or {"pld": None}
    by = words_by(costs)
    lines = [f"# Privacy card: {escape(setting.title)}", "", f"**{escape(statement(card))}**"]
    sections = {
        "Protected": [protection_sentence(card)],
        "Not protected": not_protected(card),
        "Out of scope": [
            side_channels(card),
            f"Trying out settings: {tuning(card)}",
            holdout(card),
        ],
        "What was done": [
            f"{mechanism.algorithm} on {setting.dataset}: {mechanism.releases} releases in {mechanism.steps} steps",
            *([f"Reader: {READER}"] if setting.each_record_alone else []),
            *([f"Protocol: {how}"] if (how := paper_protocol(mechanism)) else []),
            *([f"Selection: {how}"] if (how := selection(mechanism)) else []),
            f"Transform: {transform(mechanism)}",
            f"Learned features: {features(mechanism.features)}",
            f"Model {mechanism.model.name}: {model_parts(mechanism.model)}",
            f"Software: {software(card)}",
            f"Noise: {noise(card)}",
            *([f"Correlation: {how}"] if (how := correlation(card)) else []),
            f"Rounding: {rounding(card.implementation.rounding, card.implementation.device)}",
        ],
        "Accounting": [
            f"Allowed: epsilon {_number(accounting.target.epsilon)} at delta {accounting.delta:g}",
            f"Spent: {', '.join(f'epsilon {by[name]}: {_number(cost)}' for name, cost in costs.items())}",
            f"Population {setting.population}: epsilon {_number(account.spent.epsilon)} of"
            f" {_number(account.cap.epsilon)} was spent when this run had settled",
            COMPOSITION[accounting.composition.kind],
            population(card),
            *([block_unit(card)] if accounting.blocks else []),
        ],
        "The owner of the data must": owner_must(card),
        "Whom to ask": [contact(card), f"The run is {card.evidence.run_id}.", signature(card)],
    }
    for title, sentences in sections.items():
        lines += ["", f"## {title}", "", *(f"- {escape(line)}" for line in sentences)]
    return "\n".join([*lines, ""])


def _number(number: float | None) -> str:
    return "none" if number is None else rounded_up(number)


def _join_names(names: tuple[str, ...]) -> str:
    return ", ".join(names)

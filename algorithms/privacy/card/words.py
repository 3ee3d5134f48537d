"""The sentences of a privacy card: for private runs, for runs with reproducible noise and for runs without noise."""

from collections.abc import Mapping, Sequence
from decimal import ROUND_CEILING, Context
from typing import Any, Literal

from algorithms.privacy.card import start as card_start
from algorithms.privacy.card.model import Responsibility, Scope
from algorithms.privacy.card.parts import Text
from algorithms.privacy.ledger.composition import BASIC, Composition

Guarantee = Literal["private", "seeded", "diagnosed", "none"]
"""Private; noise that anyone can reproduce; secret noise, but diagnostics beside it; no noise."""

DIAGNOSED: Text = (
    "Diagnostics were computed from the records and are shown without noise; no such run is private."
)
TRANSFORMS: Mapping[str, Text] = {
    "none": "None: the records are used as they were read.",
    "scattering": "Scattering coefficients of each image, a fixed transform of each record by itself, which is free.",
}
NOTHING_LEARNED: Text = "None: nothing was learned from the records before training."
NO_NOTES: Text = "None: the model starts as its name and seed have it, and every parameter is trained."

FLOATING_POINT = (
    "A noised sum is rounded to a grid whose step is a power of two at most 2^-24 of the noise, and the noise is"
    " a whole number of these steps, so that which values can occur does not depend on the data; the noise is"
    " raised by what rounding adds to the sensitivity. PerExampleGradients are added up in 64 bits. Left open: that a"
    " draw is computed in 64-bit floating point, which changes how likely each value is, of Laplace noise within"
    " 64 scales by less than one part in 2^18, and is in no epsilon and no delta; that a record's own"
    " contribution, computed in 32 bits or fewer, does not depend on the records beside it is tested on a CPU with"
    " one thread and with two, which are the most that a run uses, and not proven."
)
NO_FLOATING_POINT = "No noise was added, so there is nothing to protect from rounding."
ONE_RUN = "This card states the cost of one run."
ACROSS_RUNS = (
    "The epsilons and the deltas of all runs that were charged to this population add up (basic composition), and the"
    f" ledger refuses a run that would take either above the cap. {ONE_RUN}"
)
NO_LEDGER: Text = "none: no ledger kept this run"
UNKEPT: Text = (
    "No ledger kept this run, and nobody was charged for it: the numbers here are those of this run alone, and whoever"
    f" trains on the same records again has to add up the costs by hand. {ONE_RUN}"
)
COMPOSITION: Mapping[str, Text] = {
    "schedule": "The releases were fixed before the first one, so both accountants apply to them as a whole.",
    "zcdp": (
        "Releases were chosen on the way, under a zCDP filter whose rho was fixed before the first one; the epsilon is"
        " that of the whole rho, also where less was used."
    ),
    "renyi": (
        "Releases were chosen on the way, under a Rényi filter whose order and limit were fixed before the first one;"
        " the epsilon is that of the whole limit, also where less was used."
    ),
}
SO_FAR: Text = (
    "Releases were chosen on the way: an epsilon so far is what those up to a step add up to. No theorem makes it the"
    " cost of a run that is ended there because of what was seen; what holds is the epsilon of the whole filter."
)
_CHANGE = {"ADD_OR_REMOVE_ONE": "added or removed", "REPLACE_ONE": "replaced by another"}
_OTHERWISE = {"ADD_OR_REMOVE_ONE": "without it", "REPLACE_ONE": "with any other record in its place"}
_RELEASED = {
    "model": "the trained model, to be passed on freely",
    "trace": "the noise trace: what was asked of the records and with how much noise, never an answer without it",
    "plan": "the plan, this card and the report: computed from public values, the above and the held-out records",
}
_DIAGNOSTICS = "the diagnostics: norms of exact gradients and the share of clipped records, without noise"
_HIDDEN = "Losses, gradient norms and batch sizes without noise were neither logged nor kept after the run."
_SHOWN = "Norms of gradients without noise were stored, as diagnostics."
NOT_MEASURED: Text = "None: the run measured nothing on held-out records."
_HOLDOUT = {
    "none": NOT_MEASURED,
    "public": (
        "Accuracy was measured on held-out records that the data card declares public. They were not trained on, and"
        " nothing here protects them."
    ),
}


def rounded_up(number: float, digits: int = 4) -> str:
    """A number in `digits` significant digits, never below it, as statements about privacy need it."""
    return f"{Context(prec=digits, rounding=ROUND_CEILING).create_decimal(repr(float(number))).normalize():f}"


def statement(
    guarantee: Guarantee,
    *,
    epsilon: float | None,
    delta: float,
    unit: str,
    adjacency: str = "ADD_OR_REMOVE_ONE",
    caveat: str | None = None,
    diagnosed: bool = False,
    started: bool = False,
) -> str:
    """The promise in a sentence. epsilon: of the recorded events, also where noise was not secret.

    caveat: why the plan itself says that this epsilon does not hold; such a run is seeded, and never private.
    diagnosed: whether diagnostics were computed from the records, which is said in any case. started: whether the model
    starts from a file, of which it may keep all, which is said in any case, too.
    """
    said = _of_the_run(guarantee, epsilon, delta, unit, adjacency, caveat)
    is_promise = not said.startswith("NOT PRIVATE: ")
    if started and is_promise:
        said = f"{said.removesuffix('.')}; {card_start.BESIDE}."
    said = f"{said} {DIAGNOSED}" if diagnosed and guarantee != "diagnosed" else said
    return card_start.said_of(said) if started and not is_promise else said


def _of_the_run(
    guarantee: Guarantee, epsilon: float | None, delta: float, unit: str, adjacency: str, caveat: str | None
) -> str:
    if caveat is not None:
        return f"NOT PRIVATE: {caveat}"
    if guarantee == "none" or epsilon is None:
        return "NOT PRIVATE: the model was trained without noise and may give away the records it was trained on."
    numbers = f"epsilon = {rounded_up(epsilon)} and delta = {delta:g}"
    if guarantee == "diagnosed":
        return f"NOT PRIVATE: {DIAGNOSED} Without them the same releases would have had {numbers}."
    if guarantee == "seeded":
        return (
            "NOT PRIVATE: the noise came from a seeded generator, so that anyone can compute it and take it away;"
            f" with secret noise the same releases would have had {numbers}."
        )
    return f"Differential privacy with {numbers}, when one record ({unit}) is {_CHANGE[adjacency]}."


def features(chosen: Mapping[str, Any]) -> Text:
    """What was learned before training, in words. chosen: that group of params.yaml, with the name of the features."""
    if chosen["name"] == "none":
        return NOTHING_LEARNED
    settings = ", ".join(f"{key}: {value}" for key, value in chosen.items() if key != "name")
    described = f"{chosen['name']} ({settings})" if settings else chosen["name"]
    return f"{described}: learned from the records by noised releases, which are charged with the others."


def notes(of_model: Sequence[str]) -> Text:
    """What is public of a model, in words."""
    return " ".join(of_model) or NO_NOTES


def scope(
    guarantee: Guarantee,
    public: Mapping[str, Any],
    *,
    adjacency: str = "ADD_OR_REMOVE_ONE",
    diagnosed: bool = False,
    started: bool = False,
) -> Scope:
    """Who is protected, who is not, and from what. public: the description of the data set."""
    return Scope(
        protected=_protected(guarantee, public["unit"], adjacency, started),
        not_protected=_not_protected(public, started),
        released=(*_RELEASED.values(), *([_DIAGNOSTICS] if diagnosed else [])),
        holdout=_HOLDOUT[public["holdout"]],
        hyper_parameter_search=(
            "Not part of this run's epsilon. Every run that was tried on this population is charged to its ledger on"
            " its own; settings that were chosen by looking at these records elsewhere are charged nowhere."
        ),
        side_channels=(
            "Out of scope: how long training took, its memory and power use, and access to the machine that held the"
            f" records. {_SHOWN if diagnosed else _HIDDEN}"
        ),
    )


def _protected(guarantee: Guarantee, unit: str, adjacency: str, started: bool) -> str:
    private = guarantee == "private"
    start = card_start.protected(private=private) if started else ""
    if not private:
        return f"Nobody.{start}"
    return (
        f"Whoever contributed one record ({unit}) to the training data: all that was released would have looked nearly"
        f" the same {_OTHERWISE[adjacency]}, whatever else an attacker knows and can compute.{start}"
    )


def _not_protected(public: Mapping[str, Any], started: bool) -> tuple[str, ...]:
    if public["records"] is None:
        number = "The bound on the number of records that the data card states; the number itself is private."
    else:
        number = f"The number of training records, {public['records']}, which the data card declares public."
    records = ("The records themselves, which the data card declares public.",) if public["public"] else ()
    start = (card_start.not_protected(),) if started else ()
    return (
        *records,
        *start,
        f"Whoever contributed several records: what is protected is {public['unit']}, and k of them together only at"
        " an epsilon of up to k times as much and a far larger delta.",
        "What holds for people in general: it can be learned without any single record, and then applies to everybody.",
        "The held-out records.",
        number,
    )


def responsibility(
    guarantee: Guarantee, public: Mapping[str, Any], *, started: bool = False
) -> Responsibility:
    """What the promise needs from the owner of the data; it names no contact that the data card does not name."""
    return Responsibility(
        owner_must=(
            f"See to it that one record is what has to be protected ({public['unit']}), and that nobody contributed"
            " more of them than that.",
            "Charge all data sets that hold the same people to one population, and count releases made elsewhere.",
            "Declare classes, categories, bounds and shapes in the data card without looking at the private records.",
            "Keep the ledger, never put an older copy of it back, and keep this card's ledger_head outside of it.",
            "Keep the records, the prepared data and the folders of unfinished runs from everybody else.",
            _last_word(guarantee, started),
        ),
        contact=f"The data card names no person; it names this source: {public['source']}",
    )


def _last_word(guarantee: Guarantee, started: bool) -> str:
    private = guarantee == "private"
    start = card_start.last_word(private=private) if started else ""
    if private:
        return f"Decide whether this epsilon is small enough for these people; no number decides that for you.{start}"
    return f"Publish nothing of this run unless the records themselves are public.{start}"


def block_unit(unit: str, blocks_per_person: int) -> Text:
    """Whom the numbers of a block protect, in words. unit: what one record is."""
    if blocks_per_person == 1:
        return (
            f"Protected is one record ({unit}) in one block: a record lies in no other, so it loses what was spent on"
            " its block and nothing to the others."
        )
    return (
        f"Protected is one person with records ({unit}) in at most {blocks_per_person} blocks: every charge is"
        f" multiplied by {blocks_per_person}, so that all records of the person together lose no more than the largest"
        " number among the person's blocks. The run's own epsilon is that of one record."
    )


def across_runs_of(composition: Composition) -> Text:
    """How the runs on one account add up, in words."""
    shown = (
        ", each from the run's events; an epsilon is that of its own sum at the cap's delta, so that spent and"
        " remaining need not add up to the cap"
    )
    rule = {
        "basic": "The epsilons and the deltas of all runs add up (basic composition)",
        "zcdp": f"The rho of all runs add up (zCDP){shown}",
        "renyi": f"The Rényi divergences of order {composition.order} of all runs add up{shown}",
    }
    return f"{rule[composition.kind]}. The ledger refuses a run that would take a sum above its cap."


def across_runs(ledger: Mapping[str, Any]) -> Text:
    """What the card says of all runs on the population; ledger: a receipt's part about it."""
    composition = Composition.from_json(ledger.get("composition"))
    if not ledger.get("kept", True):
        return UNKEPT
    if ledger.get("blocks"):
        return (
            f"{across_runs_of(composition)} That holds in each block by itself; the numbers here are those of the"
            f" block of which the greatest share is charged. {ONE_RUN}"
        )
    return ACROSS_RUNS if composition == BASIC else f"{across_runs_of(composition)} {ONE_RUN}"

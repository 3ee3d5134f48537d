"""The ledger that a checkout charges, and the population of a data card in it.

An older copy of the ledger that was restored is detected by the heads that this home saw last, see
`algorithms.privacy.ledger.location`, and by the head in the receipt of the checkout's last run. The receipt of another
ledger, as in a checkout from another machine, says nothing about this one.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from algorithms.errors import BudgetRefusedError, RefusedError
from algorithms.privacy import ledger as ledgers
from algorithms.privacy.accounting import Budget
from algorithms.privacy.ledger import (
    UNIT,
    WHOLE_POPULATION,
    Chain,
    Checkpoint,
    ChosenComposition,
    Composition,
    Entry,
    Ledger,
    Terms,
    check_location,
    choose_composition,
    contents,
    identity,
    keep_usual,
)
from data import DatasetInfo
from data.files import read_json, write_text
from data.prepared import block_digests, changed_records_error
from tasks.config import home, ledger_url, params
from tasks.runs.signing import signing_key

if TYPE_CHECKING:
    from algorithms.core.plan import Plan

_HOLDOUT, _BLOCKS, _HELD_OUT = "holdout", "blocks", "held_out"
"""Terms of a population: the rule by which records are held out, what divides blocks; whether they are private."""


def open_ledger(root: Path, settings: params.Params | None = None) -> Ledger:
    """Open the ledger that the checkout at `root` charges; raises LedgerBrokenError if it is an older copy.

    settings: in place of params.yaml. For a folder without params.yaml, it is the ledger that a notebook charges.
    """
    file = root / "params.yaml"
    if settings is None and file.exists():
        settings = params.load(file, reads=("ledger",))
    url = ledger_url(None if settings is None else settings.ledger.url)
    return open_newest(url, home=home(), root=root, remembers=True)


def open_newest(url: str, *, home: Path, root: Path, remembers: bool = False) -> Ledger:
    """Open the newest state of the ledger, and compare the ledger with the receipt of the checkout at `root`, too.

    remembers: whether `home` records the ledger's head now, too, and not only after a change.
    """
    receipt = root / "artifacts" / "receipt.json"
    entry = read_json(receipt).get("ledger", {}) if receipt.is_file() else {}

    def check(chain: Chain) -> None:
        """Unless the receipt is of another ledger, or too old."""
        if entry.get("first") is not None and entry["first"] == chain.first:
            chain.check_contains(str(entry["head"]))

    return ledgers.open_newest(url, home=home, check=check, remembers=remembers)


def keep_checkpoint(checkpoint: Checkpoint) -> None:
    """Sign a checkpoint and store it in the home, replacing the previous one."""
    if checkpoint.first is None:
        return
    file = _checkpoint_file(checkpoint.first)
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_text(file, checkpoint.to_signed_json(signing_key(home())), mode=0o600)


def stored_checkpoint(ledger: Ledger) -> Checkpoint | None:
    """The stored checkpoint of a ledger, or None. Raises RefusedError if this home did not sign it."""
    file = _checkpoint_file(identity(ledger) or "")
    if not file.is_file():
        return None
    return Checkpoint.load(file.read_text(encoding="utf-8"), signing_key(home()).public_key())


def _checkpoint_file(first: str) -> Path:
    return home() / "ledger_checkpoints" / f"{first[:16]}.json"


def register(
    ledger: Ledger,
    info: DatasetInfo,
    *,
    home: Path,
    prepared: Path,
    plan: "Callable[[], Plan] | None" = None,
) -> None:
    """Do `declare` in the ledger in which these people are always charged; raises RefusedError for another ledger.

    prepared: the folder of the records. plan: see `declare`. Raises BudgetRefusedError if another block was charged for
    exactly these records.
    """
    check_location(ledger, info.population, public=info.is_public, home=home)
    declare(ledger, info, content_digests=digests_of(info, prepared), plan=plan)


def digests_of(info: DatasetInfo, prepared: Path) -> dict[str, list[str]]:
    """The keyed digests of the prepared blocks; empty for public records, which may be in any number of blocks."""
    return block_digests(prepared) if info.blocks and not info.is_public else {}


def bind(ledger: Ledger, info: DatasetInfo, *, home: Path, prepared: Path) -> None:
    """Check, for a run that is reserved, that the population's fixed terms are those that the run was registered with.

    Raises RefusedError or DataRefusedError before anything is trained, if another run with another card or ledger came
    first, or the records were prepared again.
    """
    if not info.is_public:
        keep_usual(ledger, info.population, home=home)
    check_terms(ledger, info)
    charged, prepared_digests = ledger.reserved_digests(info.population), digests_of(info, prepared)
    if any(
        contents(charged.get(name, ())).isdisjoint(prepared_contents)
        for name, prepared_contents in prepared_digests.items()
    ):
        raise changed_records_error(prepared)


def plan_composition(info: DatasetInfo, plan: "Plan") -> ChosenComposition | None:
    """How the runs on a new population will add up if its card plans a number of them, all like `plan`; else None."""
    if info.composition_runs is None:
        return None
    # It imports PyTorch, which the ledger's commands do without.
    from algorithms.core.receipt import reserved_events

    terms = Terms(info.is_public, Composition(), info.blocks_per_person)
    return choose_composition(
        info.composition_runs,
        cost=plan.cost,
        events=reserved_events(plan),
        adjacency=plan.adjacency,
        cap=Budget(info.cap_epsilon, info.cap_delta),
        blocks_per_person=info.blocks_per_person,
        group_size=terms.group_size(info.blocks or (WHOLE_POPULATION,)),
    )


def composition_for(info: DatasetInfo, chosen: ChosenComposition | None) -> Composition:
    """How the runs on a new population will add up: as `plan_composition` has chosen, or else as the card says."""
    return chosen.composition if chosen else Composition(info.composition, info.composition_order)


def _of_first_run(info: DatasetInfo, plan: "Plan") -> Composition:
    """The composition that the first run decides by `plan_composition`.

    Raises BudgetRefusedError if that run does not fit, so that it decides nothing.
    """
    chosen = plan_composition(info, plan)
    assert chosen is not None
    if chosen.per_run > info.cap_epsilon and not info.is_public:
        raise BudgetRefusedError(
            "a run at epsilon {epsilon:g} takes {share:.6g} of the cap of population"
            " {population!r}, which is {cap:g}; ask for a smaller epsilon, or raise `cap` in the"
            " data card.",
            code="above_cap",
            epsilon=plan.cost.epsilon,
            share=chosen.per_run,
            population=info.population,
            cap=info.cap_epsilon,
        )
    return chosen.composition


def declare(
    ledger: Ledger,
    info: DatasetInfo,
    *,
    content_digests: Mapping[str, Sequence[str]] | None = None,
    plan: "Callable[[], Plan] | None" = None,
) -> None:
    """Declare the population and its blocks if they are new; raises RefusedError if the name has another kind.

    content_digests: of the blocks, once they are prepared; see `Ledger.reserve`. plan: makes the plan of the first run,
    which a new population needs if its card plans a number of runs.

    The kind also differs if the unit differs. For a private population it also differs if other records are held out,
    since records trained on would be published, or if the blocks are defined in another way, since a person would have
    a cap for each definition.
    """
    cap = Budget(info.cap_epsilon, info.cap_delta)
    terms = ledger.find_terms(info.population)
    if info.composition_runs is None:
        composition = Composition(info.composition, info.composition_order)
    elif terms is not None:
        composition = terms.composition
    else:
        assert plan is not None
        composition = _of_first_run(info, plan())
    before = terms.bound if terms is not None else {}
    if _holds_out_otherwise(info, before) and ledger.is_charged(info.population):
        _check_held_out(ledger, info, before)
    bound = {UNIT: info.unit, _HOLDOUT: info.holdout_rule, _BLOCKS: info.blocks_by}
    # Populations of before have no such term: theirs are public.
    bound[_HELD_OUT] = info.holdout if "private" in (info.holdout, before.get(_HELD_OUT)) else None
    ledger.declare(
        info.population,
        cap,
        public=info.is_public,
        composition=composition,
        blocks_per_person=info.blocks_per_person,
        bound={name: value for name, value in bound.items() if value is not None},
    )
    check_terms(ledger, info)
    if content_digests:
        ledger.check_contents(info.population, content_digests)
    declared = {block.name for block in ledger.blocks(info.population)} if info.blocks else set()
    for block in info.blocks:
        if block not in declared:
            ledger.declare_block(info.population, block)


def open_runs(history: Sequence[Entry]) -> list[str]:
    """The runs that have reserved and not ended, in order, by the rows of a population."""
    ended = {row.run_id for row in history if row.kind in ("settle", "forfeit")}
    reserved = dict.fromkeys(row.run_id for row in history if row.kind == "reserve")
    return [run_id for run_id in reserved if run_id and run_id not in ended]


def missing_blocks(ledger: Ledger, population: str, names: Sequence[str]) -> str | None:
    """Which blocks were charged, are not retired and are not among `names`, as a sentence; None without one."""
    missing = [
        block.name
        for block in ledger.blocks(population)
        if block.runs and not block.retired and block.name not in names
    ]
    if not missing:
        return None
    shown = ", ".join(map(repr, missing[:5])) + (" and others" if len(missing) > 5 else "")
    return (
        f"blocks of population {population!r} that were charged are not there: {shown}. What is spent on their people"
        " stays spent. If these people are in another block now, they have a second cap there: bring the blocks back"
        f" under their names. If they left for good, `epsilonflow ledger retire {population} {missing[0]}`."
    )


def check_terms(ledger: Ledger, info: DatasetInfo) -> None:
    """Raise RefusedError if a population in the ledger has other terms than the card; none of them ever changes."""
    terms, name = ledger.terms(info.population), info.population
    if terms.public != info.is_public:
        kinds = ("private", "public")
        raise RefusedError(
            "the population {population!r} is {declared} in the ledger, but the card of"
            " {dataset!r} says {kind}; give the card a population of its own.",
            code="unlike_population",
            population=name,
            declared=kinds[not info.is_public],
            dataset=info.dataset,
            kind=kinds[info.is_public],
            differing="public",
        )
    composition = terms.composition  # which the card leaves open where it plans a number of runs
    if info.composition_runs is None:
        composition = Composition(info.composition, info.composition_order)
    count = info.blocks_per_person
    if (terms.composition, terms.blocks_per_person) != (composition, count):
        raise RefusedError(
            "the population {population!r} was declared under {declared} with at most"
            " {declared_count} records of a person, but the card of {dataset!r} says {composition}"
            " and {count}; neither ever changes, so set the card back or give it a population of its own.",
            code="unlike_population",
            population=name,
            declared=terms.composition,
            declared_count=terms.blocks_per_person,
            dataset=info.dataset,
            composition=composition,
            count=count,
            differing="composition",
        )
    _check_bound(ledger, info, terms.bound)


def _check_bound(ledger: Ledger, info: DatasetInfo, bound: Mapping[str, str]) -> None:
    """Raise RefusedError if the card has another unit, split or blocks than its first run bound the population to."""
    if info.unit != bound[UNIT]:
        raise RefusedError(
            "the population {population!r} counts {declared!r} as one record, but the card of"
            " {dataset!r} says {unit!r}, and what is spent on one does not add up with what is spent on"
            " the other; set the unit back or, for other people only, give the card a population of its own.",
            code="unlike_population",
            population=info.population,
            declared=bound[UNIT],
            dataset=info.dataset,
            unit=info.unit,
            differing="unit",
        )
    if info.holdout_rule != bound.get(_HOLDOUT) and not info.is_public:
        raise RefusedError(
            "the population {population!r} holds out other records than the card of {dataset!r}, whose"
            " split, columns, classes or test file have changed or are those of another card, so that records trained"
            " on could be published as held out; set them back or, for other people only, give the card a population"
            " of its own.",
            code="unlike_population",
            population=info.population,
            dataset=info.dataset,
            differing="held-out records",
        )
    _check_held_out(ledger, info, bound)
    if info.blocks_by not in (None, bound.get(_BLOCKS)):
        raise RefusedError(
            "the blocks of the population {population!r} are made by {declared}, but the card of"
            " {dataset!r} makes them by {blocks_by}, which would give each person a second cap; set it"
            " back or, for other people only, give the card a population of its own.",
            code="unlike_population",
            population=info.population,
            declared=bound[_BLOCKS],
            dataset=info.dataset,
            blocks_by=info.blocks_by,
            differing="blocks",
        )


def holdout_note(info: DatasetInfo) -> dict[str, str]:
    """The ledger's entry about a run whose held-out records are private."""
    return {_HELD_OUT: "private"} if info.holdout == "private" else {}


def _holds_out_otherwise(info: DatasetInfo, bound: Mapping[str, str]) -> bool:
    """Whether the held-out records of a private population were private and are to be public, or the reverse."""
    is_same = (bound.get(_HELD_OUT) == "private") == (info.holdout == "private")
    return not (is_same or info.is_public or _HOLDOUT not in bound)


def _check_held_out(ledger: Ledger, info: DatasetInfo, bound: Mapping[str, str]) -> None:
    """Raise RefusedError if the population's held-out records were private and are to be public, or the reverse.

    What left of them exactly cannot be taken back, and what was promised them cannot be given up. Where nothing says
    how records are held out, as after calls of `fit`, nothing has left of them.
    """
    if not _holds_out_otherwise(info, bound):
        return
    is_private = bound.get(_HELD_OUT) == "private"
    reserved = [row for row in ledger.history(info.population) if row.kind == "reserve"]
    first = f" as run {reserved[0].run_id} was made with" if reserved else ""
    if is_private:
        raise RefusedError(
            "the held-out records of population {population!r} are private,{first}, and the card of"
            " {dataset!r} declares them public; set holdout back to private.",
            code="unlike_population",
            population=info.population,
            first=first,
            dataset=info.dataset,
            differing="holdout",
        )
    raise RefusedError(
        "the held-out records of population {population!r} are public,{first}, whose exact metrics have left,"
        " and the card of {dataset!r} says that they are private; set holdout back to public or, for other"
        " people only, give the card a population of its own.",
        code="unlike_population",
        population=info.population,
        first=first,
        dataset=info.dataset,
        differing="holdout",
    )

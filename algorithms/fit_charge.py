"""The run of one call of `fit` and the population that pays for it: reserved, settled, or given up."""

import hashlib
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd

from algorithms.core.plan import Plan
from algorithms.core.receipt import account_of, receipt_of, reserved_events
from algorithms.core.rehearsal import made_up_result, rehearsal
from algorithms.core.software import software_facts, software_here
from algorithms.errors import RefusedError
from algorithms.fit_arguments import BY_STATEMENT, ROWS
from algorithms.fit_refusals import LEFT_OPEN
from algorithms.privacy.accounting import Budget, EventRow
from algorithms.privacy.card import PrivacyCard, RunRecord, build
from algorithms.privacy.documents import DataFacts, PlanDocument, RunIdentity
from algorithms.privacy.ledger import (
    UNIT,
    Ledger,
    check_location,
    checked_url,
    home,
    keep_usual,
    ledger_url,
    open_newest,
)

_DECIDING_FILES = tuple(
    f"algorithms/{name}.py" for name in ("fit_arguments", "fit_losses", "fit_model", "fit_records", "fitting")
)
"""What decides the result of a call beside what decides any training."""


def data_facts(
    dataset: str,
    unit: str,
    records: int | None,
    per_person: int | None,
    *,
    public: bool,
    rows_by: str,
) -> DataFacts:
    """What the card says of records in memory; there is no data card of them. rows_by: how rows are grouped."""
    return DataFacts(
        dataset=dataset,
        title=dataset,
        source="records in memory, of which no data card names a source",
        licence="not stated",
        unit=unit,
        public=public,
        records=records,
        holdout="none",
        transform="none",
        per_person=None if per_person is None else 1,  # all of a person's rows are one record
        pooled=per_person if per_person != 1 else None,
        unit_is_stated=rows_by == BY_STATEMENT,
    )


@dataclass(frozen=True)
class Payer:
    """The population that pays for a run.

    public, bound: its terms. cap: with which `reserve` declares it, if it is new to the ledger. url: of the
    ledger; None without a named population, where a new ledger is made and deleted after the call.
    """

    ledger: Ledger
    population: str
    public: bool
    bound: Mapping[str, str]
    cap: Budget | None = None
    url: str | None = None

    @classmethod
    def open(
        cls,
        population: str | None,
        url: str | None,
        cap: tuple[float, float] | None,
        folder: Path,
        *,
        limit: Budget,
        public: bool,
        bound: Mapping[str, str],
    ) -> "Payer":
        """Raises RefusedError if the population has other terms or another ledger, or is new with no cap of `limit`."""
        if population is None:
            if url is not None or cap is not None:
                raise RefusedError(
                    "a ledger or a cap was given without a population; name the population to charge."
                )
            ledger_in_folder = Ledger.open(f"sqlite:///{folder}/ledger.sqlite")
            return cls(ledger_in_folder, "none", public, bound, limit)
        url = ledger_url(None) if url is None else checked_url(url)
        ledger = open_newest(url, home=home())
        check_location(ledger, population, public=public, home=home())
        if population not in ledger.populations():
            if cap is None:
                raise RefusedError(
                    f"the ledger does not know the population {population!r}; give cap=(epsilon, delta), the most that"
                    " all runs on these people may cost together."
                )
            try:
                epsilon, delta = map(float, () if isinstance(cap, str | Mapping) else cap)
            except (TypeError, ValueError):
                raise RefusedError(
                    f"cap is {cap!r}; give a pair (epsilon, delta), such as (10, 1e-4)."
                ) from None
            total = Budget(epsilon, delta)
            if total.epsilon < limit.epsilon or total.delta < limit.delta:
                raise RefusedError(
                    f"the cap {total} of the new population {population!r} is below this call's own"
                    f" {limit}; give a cap for all runs on these people together, which stays."
                )
            return cls(ledger, population, public, bound, total, url)
        account = cls(ledger, population, public, bound, url=url)
        account._check()
        return account

    def reserve(self, run: "FitRun") -> None:
        """Declare the population if it is new, and reserve the run's cost."""
        if self.cap is not None:
            self.ledger.declare(self.population, self.cap, public=self.public, bound=self.bound)
            self._check()  # another call may have declared it meanwhile
        elif self.bound[ROWS] == BY_STATEMENT:
            self._bind_statement()
        notes = run.document.ledger_notes
        events = reserved_events(run.plan)
        # The charge: once this returns, records may be read.
        self.ledger.reserve(run.run_id, self.population, run.plan.cost, events=events, notes=notes)
        if self.url is not None and not self.public:
            keep_usual(self.ledger, self.population, home=home())

    @contextmanager
    def closing(self, run: "FitRun") -> Iterator[None]:
        """Give up a run that fails after its charge, and state its cost in the exception, whatever it is."""
        try:
            yield
        except BaseException as error:
            status: str | None = "unknown"  # which counts as charged, if the ledger does not answer
            with suppress(Exception):
                status = self.ledger.status(run.run_id)
                if status == "open":
                    self.ledger.forfeit(run.run_id)
                    status = "forfeited"
            if status is not None:
                vars(error)["charged"] = run.plan.cost
            if status is not None and not self.public:
                whose = f" of the population {self.population!r}, for run {run.run_id}" if self.url else ""
                error.add_note(
                    f"{run.plan.cost}{whose} were charged before this happened and count as spent; the same"
                    " call is not resumed, and is charged again."
                )
            if self.url is not None and status in ("open", "unknown"):
                error.add_note(LEFT_OPEN.format(run_id=run.run_id))
            raise

    def _check(self) -> None:
        """Raises RefusedError if the population has other terms in the ledger."""
        terms = self.ledger.terms(self.population)
        bound = terms.bound
        if terms.public != self.public:
            kinds = ("private", "public")
            raise RefusedError(
                f"the population {self.population!r} is {kinds[not self.public]} in the ledger, and"
                f" public={self.public} was given; set that right or name another population."
            )
        if bound[UNIT] != self.bound[UNIT]:
            raise RefusedError(
                f"the population {self.population!r} counts {bound[UNIT]!r} as one record, and"
                f" unit={self.bound[UNIT]!r} was given; set that right, by the people whom rows belong to, or name"
                " another population."
            )
        if bound.get(ROWS, self.bound[ROWS]) != self.bound[ROWS]:
            raise RefusedError(
                f"the population {self.population!r} takes rows {bound[ROWS]}, and this call takes them"
                f" {self.bound[ROWS]}, which would not add up; give people and one_row_per_unit as before, or name"
                " another population."
            )

    def _bind_statement(self) -> None:
        """Bind a population that does not say how rows are grouped to the caller's statement."""
        terms, cap = self.ledger.terms(self.population), self.ledger.balance(self.population).cap
        self.ledger.declare(
            self.population,
            cap,
            public=terms.public,
            composition=terms.composition,
            blocks_per_person=terms.blocks_per_person,
            bound=self.bound,
        )
        self._check()


@dataclass(frozen=True)
class FitRun:
    """The run of one call. data: what a data card would state."""

    plan: Plan
    document: PlanDocument
    data: DataFacts
    device: str
    run_id: str = field(default_factory=lambda: f"fit-{secrets.token_hex(8)}")

    def rehearse(self) -> None:
        """Raises RefusedError if no card could be made of this run."""
        with rehearsal():
            budget = self.plan.target.budget
            receipt, trace = made_up_result(self.plan, self._identity("none"), cap=budget, head=None)
            build(RunRecord(self.document, receipt, self.data, trace))

    def settle(
        self,
        account: Payer,
        files: Mapping[str, bytes],
        trace: pd.DataFrame,
        events: list[EventRow],
    ) -> PrivacyCard:
        """Settle the run's cost and build its card. files: the released files, by name."""
        sums = {file: hashlib.sha256(content).hexdigest() for file, content in files.items()}
        # In full, also where the method ended early: when to end was then chosen by what was released.
        account.ledger.settle(self.run_id, self.plan.cost, events=events, model=sums["model.safetensors"])
        paid = account_of(account.ledger, account.population, self.run_id)
        receipt = receipt_of(
            self._identity(account.population),
            self.plan,
            events,
            releases=len(trace),
            account=paid if account.url else paid.model_copy(update={"head": None}),
            software=software_facts(Path(__file__).parent, software_here(_DECIDING_FILES)),
            sha256=sums,
        )
        return build(RunRecord(self.document, receipt, self.data, trace))

    def _identity(self, population: str) -> RunIdentity:
        return RunIdentity(
            run_id=self.run_id,
            algorithm=self.document.algorithm,
            dataset=self.document.dataset,
            population=population,
            description_sha256=None,
            private_noise=self.document.noise == "secure",
            diagnostics=False,
            device=self.device,
        )

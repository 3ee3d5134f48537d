"""What a training and a search have in common: a run is claimed, reserved in the ledger, and settled with a receipt."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch

from algorithms.core.plan import Plan
from algorithms.core.receipt import account_of, receipt_of, reserved_events
from algorithms.core.software import Software, software_facts
from algorithms.privacy.accounting import EventRow
from algorithms.privacy.accounting.events import Schedule, schedule_to_json
from algorithms.privacy.documents import RunIdentity
from algorithms.privacy.ledger import Ledger
from algorithms.privacy.mechanisms.noise import generator_of
from data import DatasetInfo
from data.files import hide
from tasks.runs import store
from tasks.runs.ledger import digests_of
from tasks.runs.signing import signer
from tasks.runs.software import check_resumes, pipeline_software
from tasks.runs.store import EVALUATION, PLAN, RECEIPT, data_facts


@contextmanager
def claim_run(
    digest: str,
    ledger: Ledger,
    info: DatasetInfo,
    *,
    noise: str,
    seed: int,
    confirm_repeat: store.OnRepeat,
    home: Path,
    root: Path,
) -> Iterator[tuple[store.RunAttempt, Software]]:
    """Within the block, this process alone has the run, with its result if it has one; see `store.acquire_run`.

    digest: of everything that decides the result. noise, seed: of its generator, see `generator_of`. confirm_repeat:
    asks whether to repeat a charged run on private records; public ones cost nothing. Raises RefusedError if the run
    was begun by other software, which may draw another gradient under the same noise.
    """
    software = pipeline_software()

    def on_repeat(run_id: str, has_result: bool) -> bool:
        return not has_result if info.is_public else confirm_repeat(run_id, has_result)

    with store.acquire_run(
        home,
        digest,
        ledger.status,
        checkout=root,
        new_generator=generator_of(noise, seed),
        on_repeat=on_repeat,
        notes=software.notes,
    ) as run:
        if run.result is None:
            check_resumes(run, ledger, info.population, software)
        yield run, software


@dataclass(frozen=True)
class ChargedRun:
    """A training or a search, with the ledger that is charged for it, its records and their blocks, and its folders."""

    ledger: Ledger
    run: store.RunAttempt
    software: Software
    info: DatasetInfo
    prepared: Path
    blocks: tuple[str, ...]
    home: Path
    root: Path

    def identity(self, algorithm: str, device: torch.device, *, diagnostics: bool = False) -> RunIdentity:
        """The part of the receipt that is known before the charge."""
        return RunIdentity(
            run_id=self.run.run_id,
            algorithm=algorithm,
            **data_facts(self.info),
            blocks=self.blocks,
            private_noise=self.run.private_noise,
            diagnostics=diagnostics,
            device=device.type,
        )

    def reserve(self, plan: Plan, notes: Mapping[str, str]) -> None:
        """Reserve the plan's cost. notes: of the ledger's entry, to which signer, noise and software are added.

        A settled run without a result was killed in between: it is repeated without another charge.
        """
        if self.run.ledger_status != "settled":
            self.ledger.reserve(
                self.run.run_id,
                self.info.population,
                plan.cost,
                events=reserved_events(plan),
                notes={**notes, **signer(self.home), **self.run.noise_key_note, **self.run.notes},
                blocks=self.blocks,
                content_digests=digests_of(self.info, self.prepared),
            )

    @property
    def settled_events(self) -> list[EventRow] | None:
        """The releases at which the run was settled before it was killed; None if it was not."""
        if self.run.ledger_status != "settled":
            return None
        rows = self.ledger.history(self.info.population)
        settled = [row for row in rows if (row.kind, row.run_id) == ("settle", self.run.run_id)]
        events: list[EventRow] = json.loads(settled[-1].events)
        return events

    def settle(self, plan: Plan, identity: RunIdentity, result: Path, schedule: Schedule) -> Path:
        """Settle the run whose model, trace and plan are in `result`, add its receipt; returns the result's folder.

        schedule: the recorded releases.
        """
        run_id, events = self.run.run_id, schedule_to_json(schedule)
        names = ["model.safetensors", "trace.parquet", PLAN]
        if (result / EVALUATION).is_file():
            names.append(EVALUATION)
        sums = {name: store.sha256_of(result / name) for name in names}
        # Before the result is named: a run that is killed here is trained again with the same noise, and `settle` then
        # refuses another model than this one.
        self.ledger.settle(run_id, plan.cost, events=events, model=sums["model.safetensors"])
        receipt = receipt_of(
            identity,
            plan,
            events,
            releases=len(pd.read_parquet(result / "trace.parquet")),
            account=account_of(self.ledger, self.info.population, run_id),
            software=software_facts(self.root, self.software),
            sha256=sums,
        )
        (result / RECEIPT).write_text(receipt.to_text(), encoding="utf-8")
        hide(result)
        return self.run.finish(result)

"""Writes the files of a finished run, in the form the stages write them, without training anything."""

import hashlib
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import pandas as pd
from safetensors.numpy import save_file

from algorithms.core.plan import Plan, by_accountants
from algorithms.gradients import L2, Unclipped
from algorithms.model_facts import FACTS
from algorithms.privacy.accounting import Budget
from algorithms.privacy.accounting.epsilon import epsilon
from algorithms.privacy.accounting.events import run_lengths, schedule_to_json
from algorithms.privacy.accounting.filters import ScheduleFilter
from algorithms.privacy.barrier.trace import Trace
from algorithms.privacy.card import RunRecord
from algorithms.privacy.documents import Amount, DataFacts, Document, PlanDocument, Receipt
from algorithms.privacy.mechanisms.release import Gaussian, NoNoise, Release, gradient_release, total_release
from algorithms.privacy.mechanisms.sampling import Poisson
from data import DatasetInfo
from tasks.runs.store import run_facts

Kind = Literal["private", "seeded", "none"]
DELTA, RATE, BATCH = 1e-5, 0.1, 40.0
CLASSES = ("cat", "dog", "owl")
_D = TypeVar("_D", bound=Document)


@dataclass(frozen=True)
class Folders:
    """Where a run was written."""

    artifacts: Path
    prepared: Path


def write_run(
    root: Path, *, kind: Kind = "private", steps: int = 12, noise_multiplier: float = 1.5
) -> Folders:
    """A run of `steps` noised gradients after a noised count, below `root`."""
    folders = Folders(root / "artifacts", root / "datasets" / "prepared")
    (folders.artifacts / "plots").mkdir(parents=True)
    folders.prepared.mkdir(parents=True)
    info = description()
    (folders.prepared / "public.json").write_text(info.to_json(), encoding="utf-8")
    trace = _trace(kind, steps, noise_multiplier)
    schedule = run_lengths(trace.events())
    costs = {
        name: cost if math.isfinite(cost) else None for name, cost in by_accountants(schedule, DELTA).items()
    }
    events = schedule_to_json(schedule)
    write_json(folders.artifacts / "plan.json", _plan(kind, steps, noise_multiplier, costs, events))
    trace.write(folders.artifacts / "trace.parquet")
    save_file(
        {"weight": np.zeros((3, 5), np.float32)},
        folders.artifacts / "model.safetensors",
        metadata={
            FACTS: json.dumps({"model": "softmax", "input_shape": [5], "classes": info.label_type.names})
        },
    )
    receipt = _receipt(folders, kind, steps, costs, events, len(trace.rows))
    write_json(folders.artifacts / "receipt.json", receipt)
    facts = run_facts(Receipt.model_validate(receipt))
    write_json(folders.artifacts / "metrics.json", {"test_accuracy": 0.8, "test_loss": 0.61} | facts)
    _write_plots(folders.artifacts / "plots")
    return folders


def description() -> DatasetInfo:
    """The public facts of the made-up data set."""
    return DatasetInfo(
        dataset="animals",
        title="Animals & friends <drawn>",
        source="A. Painter; https://example.org/animals",
        licence="CC0",
        is_public=False,
        unit="one drawing",
        population="painters",
        cap_epsilon=10.0,
        cap_delta=1e-4,
        records=400,
        input_shape=(5,),
        classes=CLASSES,
        test_records=100,
        holdout="public",
    )


def write_json(path: Path, document: Any) -> None:
    """Writes a document as the stages do."""
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def sha256_of(path: Path) -> str:
    """The checksum of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def read_json(path: Path) -> Any:
    """Reads a document."""
    return json.loads(path.read_text(encoding="utf-8"))


def _trace(kind: Kind, steps: int, noise_multiplier: float) -> Trace:
    releases: list[Release] = []
    if kind == "none":
        releases += [gradient_release(Poisson(RATE), Unclipped(), NoNoise(), BATCH)] * steps
    else:
        releases += [total_release(L2(1.0), Gaussian(50.0))]
        releases += [gradient_release(Poisson(RATE), L2(0.5), Gaussian(noise_multiplier), BATCH)] * steps
    trace = Trace()
    schedule = run_lengths([release.event() for release in releases])
    privacy_filter = ScheduleFilter(schedule, Budget(epsilon(schedule, DELTA), DELTA), accountant="pld")
    first_step = len(releases) - steps
    for index, release in enumerate(releases):
        privacy_filter.charge(release.event())
        trace.step = max(0, index - first_step)
        trace.record(
            release,
            release.event(),
            noise_std=release.noise_scale,
            epsilon=privacy_filter.epsilon_spent(DELTA),
        )
    return trace


def _plan(
    kind: Kind, steps: int, noise_multiplier: float, costs: dict[str, Any], events: list[Any]
) -> dict[str, Any]:
    return {
        "algorithm": "non_private" if kind == "none" else "dp_sgd",
        "settings": {
            "steps": steps,
            "expected_batch_size": 40,
            "update": {"learning_rate": 0.5, "schedule": "constant"},
        },
        "features": {"name": "none"},
        "model": {"name": "softmax", "seed": 0, "parameters": 15, "notes": []},
        "dataset": "animals",
        "target": {"epsilon": 5.0, "delta": DELTA},
        "accountant": "pld",
        "count_noise": 50.0,
        "noise": "seeded" if kind == "seeded" else "secure",
        "public": {"records": 400, "parameters": 15, "layers": 1, "classes": 3},
        "adjacency": "ADD_OR_REMOVE_ONE",
        "delta": DELTA,
        "epsilon": costs,
        "steps": steps,
        "noise_multiplier": 0.0 if kind == "none" else noise_multiplier,
        "sampling_rate": RATE,
        "divisor": BATCH,
        "schedule": events,
        "filter": {"kind": "schedule"},
        "method_params": {},
        "not_private": None,
        "prior_events": [],
    }


def _receipt(
    folders: Folders, kind: Kind, steps: int, costs: dict[str, Any], events: list[Any], releases: int
) -> dict[str, Any]:
    spent = costs["pld"] or 0.0
    names = ("model.safetensors", "trace.parquet", "plan.json")
    return {
        "run_id": f"{'0a1b2c3d' * 8}-1",
        "algorithm": "non_private" if kind == "none" else "dp_sgd",
        "dataset": "animals",
        "population": "painters",
        "description_sha256": description().digest,
        "steps": steps,
        "releases": releases,
        "epsilon": costs,
        "accountant": "pld",
        "delta": DELTA,
        "events": events,
        "private_noise": kind != "seeded",
        "diagnostics": False,
        "device": "cpu",
        "software": {
            "recorded": "training",
            "python": "3.11.7",
            "packages": {"torch": "2.13.0"},
            "git": None,
        },
        "ledger": {
            "head": "f" * 64,
            "cap": {"epsilon": 10.0, "delta": 1e-4},
            "spent": {"epsilon": spent + 1.0, "delta": 2e-5},
            "remaining": {"epsilon": 9.0 - spent, "delta": 8e-5},
        },
        "sha256": {name: sha256_of(folders.artifacts / name) for name in names},
    }


def _write_plots(folder: Path) -> None:
    right = {"cat": 40, "dog": 30, "owl": 10}
    wrong = {("cat", "dog"): 8, ("dog", "owl"): 7, ("owl", "cat"): 5}
    pairs = [(name, name) for name, count in right.items() for _ in range(count)]
    pairs += [pair for pair, count in wrong.items() for _ in range(count)]
    confusion = pd.DataFrame(pairs, columns=["actual", "predicted"])
    confusion.to_csv(folder / "confusion.csv", index=False)
    totals = confusion["actual"].value_counts()
    rows = [(name, count / totals[name], int(totals[name])) for name, count in right.items()]
    pd.DataFrame(rows, columns=["class", "accuracy", "records"]).to_csv(folder / "per_class.csv", index=False)


def record(folders: Folders) -> RunRecord:
    """What the card of the run is built from."""
    artifacts = folders.artifacts
    return RunRecord(
        plan=PlanDocument.read(artifacts / "plan.json"),
        receipt=Receipt.read(artifacts / "receipt.json"),
        data=DataFacts.model_validate_json(description().to_json()),
        trace=pd.read_parquet(artifacts / "trace.parquet"),
    )


def with_entries(document: _D, **entries: Any) -> _D:
    """The document with other values of its entries, by the names in its file."""
    return type(document).model_validate_json(json.dumps(document.to_json() | entries))


def left_by(folder: Path, plan: Plan, trace: Trace) -> RunRecord:
    """The record of a run of `plan` with this trace; the files of both are written into `folder`."""
    run = record(write_run(folder / "run"))
    trace.write(folder / "trace.parquet")
    model = run.plan.model.model_copy(update={"parameters": plan.facts.parameters})
    document = run.plan.model_copy(update={**dict(plan.to_document()), "model": model})
    (folder / "plan.json").write_text(document.to_text(), encoding="utf-8")
    cost = document.epsilon[plan.accountant] or 0.0
    cap = run.receipt.ledger.cap
    spent = Amount(epsilon=cost + 1.0, delta=plan.cost.delta + 1e-5)
    left = Amount(
        epsilon=max(0.0, (cap.epsilon or 0.0) - cost - 1.0), delta=max(0.0, cap.delta - spent.delta)
    )
    sums = {name: sha256_of(folder / name) for name in ("plan.json", "trace.parquet")}
    receipt = run.receipt.model_copy(
        update={
            "epsilon": document.epsilon,
            "accountant": plan.accountant,
            "delta": plan.cost.delta,
            "events": tuple(schedule_to_json(run_lengths(trace.events()))),
            "releases": len(trace.rows),
            "ledger": run.receipt.ledger.model_copy(update={"spent": spent, "remaining": left}),
            "sha256": run.receipt.sha256 | sums,
        }
    )
    data = run.data.model_copy(update={"records": plan.facts.records})
    written = pd.read_parquet(folder / "trace.parquet")
    return replace(run, plan=document, receipt=receipt, data=data, trace=written)

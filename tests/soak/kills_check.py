"""What must hold whenever a retraining was killed, from raw rows and files, by none of the code that was killed.

Rows are read by sqlite3 and psycopg, their chain is recomputed here, and releases are priced by dp_accounting. Only a
finished model's card is checked by the project's own `verify`, which recomputes epsilon from the card's events.
"""

import hashlib
import json
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import pandas as pd
import psycopg
import pyarrow as pa
from dp_accounting.rdp import RdpAccountant

from algorithms.privacy.card import load, verify
from tests.soak.kills_place import CARD, POPULATION, Place
from tests.soak.year_check import event_of

Row = dict[str, Any]
_COLUMNS = [
    "seq",
    "kind",
    "population",
    "block",
    "run_id",
    "epsilon",
    "delta",
    "events",
    "about",
    "written_at",
    "written_by",
    "previous_hash",
    "hash",
]
_SELECT = f"SELECT {', '.join(_COLUMNS)} FROM epsilonflow_ledger ORDER BY seq"
_ENTRY = (
    "model.safetensors",
    "privacy_card.json",
    "receipt.json",
    "metrics.json",
    "plan.json",
    "trace.parquet",
)
_KEPT = {"run.json", "lock", "taken", "result"}  # of a run's folder, for good


def rows_of(place: Place) -> list[Row]:
    """The ledger's rows as they are; of SQLite from a copy of its files, so that nothing is mended by reading."""
    try:
        found = _sqlite(place.url) if place.url.startswith("sqlite") else _postgresql(place.url)
    except (sqlite3.OperationalError, psycopg.errors.UndefinedTable) as error:
        if "no such table" in str(error) or "does not exist" in str(error):
            return []
        raise
    return [dict(zip(_COLUMNS, values, strict=True)) for values in found]


def _sqlite(url: str) -> list[Any]:
    path = Path(url.removeprefix("sqlite:///"))
    with tempfile.TemporaryDirectory() as folder:
        for file in path.parent.glob(f"{path.name}*"):
            if not file.name.endswith("-shm"):
                shutil.copyfile(file, Path(folder, file.name))
        with closing(sqlite3.connect(Path(folder, path.name))) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            return connection.execute(_SELECT).fetchall()


def _postgresql(url: str) -> list[Any]:
    with psycopg.connect(url.replace("+psycopg", "")) as connection:
        return connection.execute(_SELECT).fetchall()


def problems(place: Place, before: Sequence[Row], rows: Sequence[Row]) -> list[str]:
    """What is wrong at a moment, in sentences. before: the rows that were there earlier."""
    found = [] if list(rows[: len(before)]) == list(before) else ["a row was lost or changed"]
    found += [] if _chain_holds(rows) else ["the chain does not hold"]
    reserved = [(row["run_id"], row["events"]) for row in rows if row["kind"] == "reserve"]
    periods = _periods(rows)
    found += ["a period was charged twice"] if len(periods) > len(set(periods.values())) else []
    paid = dict(reserved)
    for run_id, events in releases(place):
        if run_id not in paid:
            found.append(f"run {run_id} released without a reservation")
        elif epsilon(events) > epsilon(paid[run_id]) * (1 + 1e-9):
            found.append(f"run {run_id} released more than it reserved")
    link = place.registry / "serving"
    whole = not link.is_symlink() or all((link / name).is_file() for name in _ENTRY)
    return found + ([] if whole else ["the model that serves is not whole"])


def _periods(rows: Sequence[Row]) -> dict[str, str]:
    """The period of each run that was charged to one."""
    names = {
        row["run_id"]: json.loads(row["about"]).get("retraining") for row in rows if row["kind"] == "reserve"
    }
    return {run_id: name for run_id, name in names.items() if name is not None}


def charged_to_retrainings(rows: Sequence[Row]) -> set[str]:
    """The runs of retrainings that these rows charge."""
    return {*_periods(rows)}


def _chain_holds(rows: Sequence[Row]) -> bool:
    previous = "0" * 64
    for place, row in enumerate(rows, start=1):
        content = {key: value for key, value in row.items() if key != "hash"}
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        digest = hashlib.sha256(text.encode()).hexdigest()
        if (row["seq"], row["previous_hash"], row["hash"]) != (place, previous, digest):
            return False
        previous = digest
    return True


def releases(place: Place) -> Iterator[tuple[str, str]]:
    """Every run that left releases on the disk, with their events as the ledger writes them."""
    for path in (place.home / "runs").glob("*/state.safetensors"):
        facts = _metadata(path)
        if facts is not None:
            yield facts["run_id"], _text([row["event"] for row in facts["trace"]])
    for path in (place.home / "runs").glob("*/*/trace.parquet"):
        yield from _of_trace(path.parents[1].name.removeprefix(".gone-"), path)  # killed while it was deleted
    for folder in (place.root / "artifacts", *place.registry.glob("*-[0-9]*")):
        receipt, trace = folder / "receipt.json", folder / "trace.parquet"
        if not trace.is_file() or not receipt.is_file() or not receipt.stat().st_size:
            continue
        known = json.loads(receipt.read_text())
        if known["sha256"]["trace.parquet"] == hashlib.sha256(trace.read_bytes()).hexdigest():
            yield from _of_trace(known["run_id"], trace)


def _of_trace(run_id: str, path: Path) -> Iterator[tuple[str, str]]:
    try:
        yield run_id, _text(list(pd.read_parquet(path)["event"]))
    except (pa.ArrowInvalid, OSError):
        return  # half written: its checkpoint speaks for it


def _metadata(path: Path) -> Mapping[str, Any] | None:
    """What a checkpoint says of itself; None for one that was damaged by hand."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    if len(content) < 8 + length:
        return None
    facts: Mapping[str, Any] = json.loads(json.loads(content[8 : 8 + length])["__metadata__"]["checkpoint"])
    return facts


def _text(events: Sequence[str]) -> str:
    runs = [{"event": json.loads(event), "count": len(list(same))} for event, same in groupby(events)]
    return json.dumps(runs)


@cache
def epsilon(events: str) -> float:
    """Of a run's events together, by dp_accounting at the delta of the cap."""
    accountant = RdpAccountant()
    for document in json.loads(events):
        accountant.compose(event_of(document["event"]), document["count"])
    return float(accountant.get_epsilon(CARD["cap"]["delta"]))


def state_of(place: Place, week: int) -> Mapping[str, Any] | None:
    """What the file of a period says."""
    path = place.states / f"{place.period(week)}.json"
    state: Mapping[str, Any] | None = json.loads(path.read_text()) if path.is_file() else None
    return state


def run_of(place: Place, rows: Sequence[Row], week: int) -> str | None:
    """The run that a period is charged for."""
    name = f"{POPULATION} {place.period(week)}"
    return next((run_id for run_id, period in _periods(rows).items() if period == name), None)


def ended_badly(place: Place, rows: Sequence[Row], week: int) -> list[str]:
    """What is wrong with a period that has ended, in sentences."""
    state, run_id = state_of(place, week), run_of(place, rows, week)
    if state is None or run_id is None:
        return ["the period ended without a state or without a charge"]
    kinds = {row["kind"] for row in rows if row["run_id"] == run_id}
    left = {path.name for path in (place.home / "runs").glob(f"*{run_id}/*")}
    found = ["a run that has ended keeps secrets"] if left - _KEPT else []
    if state["kind"] == "forfeited":
        found += ["a run that was forfeited is still there"] if left else []
        return found + ([] if kinds == {"reserve", "forfeit"} else ["forfeited, but not in the ledger"])
    if state["kind"] not in ("promoted", "kept"):
        return [*found, f"the period ended as {state['kind']}"]
    entry = place.registry / run_id
    found += [] if kinds == {"reserve", "settle"} else [f"{state['kind']}, but not settled"]
    found += [] if verify(load(entry / "privacy_card.json"), entry).passed else ["the card does not verify"]
    serves = (place.registry / "serving").resolve().name == run_id
    return found + ([] if serves == (state["kind"] == "promoted") else ["another model serves than was said"])


def fell(place: Place, rows: Sequence[Row], week: int) -> str:
    """How far the retraining of a week had come."""
    state, run_id = state_of(place, week), run_of(place, rows, week)
    kinds = {row["kind"] for row in rows if row["run_id"] == run_id and run_id}
    folder = place.home / "runs" / str(run_id)
    if state is None or state["kind"] != "open":
        return "before it began" if state is None else "after its end"
    if not kinds:
        return "before the reservation"
    if "forfeit" in kinds:
        return "forfeited"
    if "settle" not in kinds:
        return "in training" if (folder / "state.safetensors").exists() else "reserved, nothing released"
    if (place.registry / str(run_id)).is_dir():
        return "after the model was kept"
    return "settled, result not kept" if (folder / "written").is_dir() else "after the settlement"

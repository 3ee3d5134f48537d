"""python -m tests.soak.fuzz: files that somebody may hand over, changed at random; what is not refused is harmless.

Each kind of file is changed ten thousand times: bytes are flipped, cut, doubled and put in, words and numbers are
replaced by others. Whatever comes out is taken, or refused in a sentence: any other exception is a traceback that a
user would see. No changed card that says something else verifies, and no changed ledger has another history.
"""

import json
import random
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import pyarrow as pa
import torch
import typer
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pyarrow import parquet
from safetensors.torch import save_file

from algorithms import models
from algorithms.core import checkpoint
from algorithms.errors import RefusedError
from algorithms.privacy.accounting import Budget
from algorithms.privacy.barrier.importance_sampling import LastNorms
from algorithms.privacy.barrier.trace import ReleaseRow, Trace
from algorithms.privacy.card import build
from algorithms.privacy.card import load as load_card
from algorithms.privacy.ledger import Checkpoint, Ledger, export, restore
from data.card import DataCard, data_card
from data.formats import Csv, Parquet
from data.readers.rows import RowReader
from tasks import retraining
from tasks.config import params
from tasks.evaluate import load_model
from tasks.runs.stage_main import refusals
from tests.support.parts import whole
from tests.support.synthetic_run import record, write_run

ROOT = Path(__file__).parents[2]
KEY = Ed25519PrivateKey.from_private_bytes(bytes(32))
_WORDS = [
    b"-1",
    b"0",
    b"1e999",
    b"nan",
    b"null",
    b"true",
    b"[]",
    b"{}",
    b'""',
    b"9" * 40,
    b"\x00",
    b"\xff",
    b"\n",
    b": ",
]


@dataclass(frozen=True)
class Target:
    """A kind of file: its content as it should be, and what takes it, which says whether it means the same still."""

    name: str
    content: bytes
    take: Callable[[Path], bool]


@dataclass
class Found:
    """What became of the changed files of a kind."""

    target: str
    changed: int = 0
    refused: int = 0
    same: int = 0
    problems: list[str] = field(default_factory=list)


def mutated(content: bytes, draw: random.Random) -> bytes:
    """The content with one to four changes."""
    for _ in range(draw.choice((1, 1, 2, 4))):
        at = draw.randrange(len(content) + 1)
        until = min(len(content), at + draw.choice((0, 1, 1, 4, 16, 200)))
        new = draw.choice(
            (
                b"",
                bytes([draw.randrange(256)]),
                draw.choice(_WORDS),
                content[draw.randrange(len(content) + 1) :][: draw.choice((1, 8, 40))],
                bytes(byte ^ 1 << draw.randrange(8) for byte in content[at:until]),
            )
        )
        content = content[:at] + new + content[until:]
    return content


def tried(target: Target, folder: Path, count: int, *, seed: int) -> Found:
    """Changes a file of a kind so often and takes each."""
    draw, found = random.Random(f"{seed} {target.name}"), Found(target.name)
    (folder / target.name).write_bytes(target.content)
    if not target.take(folder / target.name):
        found.problems.append("the file as it should be is not taken")
    for left in folder.iterdir():
        left.unlink()
    # A folder of its own for each, since a ledger would find the log of another one beside it.
    for number in range(count):
        content = mutated(target.content, draw)
        if content == target.content:
            continue
        found.changed += 1
        place = folder / f"{number}"
        place.mkdir()
        file = place / target.name
        file.write_bytes(content)
        try:
            is_same = target.take(file)
            found.same += is_same
            if not is_same:
                found.problems.append(f"seed {seed}, number {number}: says something else and is taken")
        except refusals() as refusal:
            found.refused += 1
            if "\n" in str(refusal).strip():
                found.problems.append(f"seed {seed}, number {number}: not one sentence: {refusal}")
        except Exception:
            last = traceback.format_exc().strip().splitlines()
            found.problems.append(f"seed {seed}, number {number}: {last[-1]} ({last[-3].strip()})")
        for left in place.iterdir():
            left.unlink()
        place.rmdir()
    return found


def targets(folder: Path) -> Iterator[Target]:
    """The kinds of files, each with an example made in a folder."""
    made = build(record(write_run(folder / "run")), KEY)

    def card(path: Path) -> bool:
        again = load_card(path)
        return again == made or not again.signature_holds() or again.signature is None

    yield Target("privacy_card.json", made.to_bytes(), card)
    yield Target("params.yaml", (ROOT / "params.yaml").read_bytes(), _params)
    yield Target("digits.yaml", (ROOT / "data/cards/digits.yaml").read_bytes(), _data_card)
    yield Target("adult.yaml", (ROOT / "data/cards/adult.yaml").read_bytes(), _data_card)
    yield Target("retrain.yaml", (ROOT / "examples/retraining/retrain.yaml").read_bytes(), _retraining)
    table = pd.DataFrame({"age": range(40), "town": ["Oslo", "Rome"] * 20, "answer": ["no", "yes"] * 20})
    yield Target("table.csv", table.to_csv(index=False).encode(), _table("csv"))
    parquet.write_table(pa.Table.from_pandas(table), folder / "table.parquet")
    yield Target("table.parquet", (folder / "table.parquet").read_bytes(), _table("parquet"))
    facts = {"model": "logistic", "input_shape": [3], "classes": ["no", "yes"]}
    model = models.build("logistic", input_shape=(3,), classes=2, seed=0)
    parameters = model.published_tensors(model.initial_parameters())
    save_file(parameters, folder / "model.safetensors", {"epsilonflow": json.dumps(facts)})
    yield Target("model.safetensors", (folder / "model.safetensors").read_bytes(), _model)
    yield _training(folder)
    yield from _ledgers(folder)


def _params(path: Path) -> bool:
    params.load(path, reads=params.GROUPS)
    return True  # settings are what they are; whether a plan can be made of them is asked before anything is spent


def _data_card(path: Path) -> bool:
    data_card(path.stem, path.parent)
    return True


def _retraining(path: Path) -> bool:
    retraining.load(path)
    return True


def _model(path: Path) -> bool:
    load_model(path)
    return True


def _training(folder: Path) -> Target:
    last, start = LastNorms(), {"parameters": torch.zeros(4), "momentum": torch.zeros(2, 3)}
    state = {name: torch.full_like(tensor, 0.5) for name, tensor in start.items()}
    rows = [
        ReleaseRow(
            step, step, "sum", "gaussian", "poisson", 0.1, "flat", 1.0, "gaussian", 2.0, 2.0, 25.0, 0.1 * step
        )
        for step in range(3)
    ]
    checkpoint.save(folder, state, run_id="a", step=3, trace=Trace(rows), last_norms=last)

    def take(path: Path) -> bool:
        found = checkpoint.load(path.parent, start, run_id="a", last_norms=last)
        if found is None:
            raise RefusedError("what is damaged counts as no checkpoint; training begins again.")
        same = {name: torch.equal(found[0][name], state[name]) for name in state}
        return all(same.values()) and (found[1], found[2].rows) == (3, rows)

    return Target(checkpoint.CHECKPOINT, (folder / checkpoint.CHECKPOINT).read_bytes(), take)


def _table(kind: str) -> Callable[[Path], bool]:
    columns = [
        {"name": "age", "kind": "numeric", "bounds": [0, 100]},
        {"name": "town", "kind": "categorical", "categories": ["Oslo", "Rome"]},
        {"name": "answer", "kind": "label"},
    ]
    kinds: dict[str, Any] = {"csv": Csv, "parquet": Parquet}
    declared = kinds[kind].model_validate_json(json.dumps({"kind": kind, "columns": columns}))

    def take(path: Path) -> bool:
        card = DataCard.model_construct(classes=("no", "yes"), reader=declared, public=False)
        read = whole(RowReader(card, {"train": path}).read()).train
        return bool((read.features >= 0).all() and (read.features <= 1).all() and set(read.labels) <= {0, 1})

    return take


def _ledgers(folder: Path) -> Iterator[Target]:
    ledger = Ledger.open(f"sqlite:///{folder}/ledger.sqlite")
    ledger.declare("patients", Budget(3.0, 1e-4), public=False)
    for block in ("january", "february"):
        ledger.declare_block("patients", block)
    ledger.reserve("a", "patients", Budget(1.0, 1e-5), events=[], notes={"é": "ö"}, blocks=("january",))
    ledger.settle("a", Budget(0.5, 1e-5), events=[])
    ledger.reserve("b", "patients", Budget(1.0, 1e-5), events=[], notes={}, blocks=("february",))
    history, balances = ledger.history(), ledger.balances()
    export(ledger, folder / "copy.jsonl")
    checkpoint = ledger.verify().checkpoint.to_signed_json(KEY)
    with ledger._store.database.engine.connect() as connection:
        connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")

    def copy(path: Path) -> bool:
        restore(path, f"sqlite:///{path.parent}/new.sqlite")
        again = Ledger.open(f"sqlite:///{path.parent}/new.sqlite").history()
        return again == history[: len(again)]  # rows that are missing at the end show against a head alone

    def database(path: Path) -> bool:
        again = Ledger.open(f"sqlite:///{path}")
        again.verify()
        # Whoever may write the file may do so consistently; a change by chance must not change what it says.
        return again.history() == history and again.balances() == balances

    def kept(path: Path) -> bool:
        Checkpoint.load(path.read_text(encoding="utf-8", errors="replace"), KEY.public_key())
        found, own = json.loads(path.read_text(encoding="utf-8")), json.loads(checkpoint)
        # The same signature may be written in capitals or with spaces.
        return bool(found | {"signature": ""} == own | {"signature": ""})

    yield Target("copy.jsonl", (folder / "copy.jsonl").read_bytes(), copy)
    yield Target("ledger.sqlite", (folder / "ledger.sqlite").read_bytes(), database)
    yield Target("checkpoint.json", checkpoint.encode(), kept)


def main(
    count: Annotated[int, typer.Option(help="Changed files of each kind.")] = 10_000,
    seed: Annotated[int, typer.Option(help="What chance depends on.")] = 1,
    only: Annotated[str | None, typer.Option(help="One kind of file, by its name.")] = None,
    out: Annotated[Path | None, typer.Option(help="A CSV file with the counts.")] = None,
) -> None:
    """Change and take; exit status 1 where something is not right."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "tried").mkdir()
        found = [
            tried(target, folder / "tried", count, seed=seed)
            for target in targets(folder)
            if only in (None, target.name)
        ]
    rows = [(f.target, f.changed, f.refused, f.same, len(f.problems)) for f in found]
    table = pd.DataFrame(rows, columns=["file", "changed", "refused", "taken, the same", "problems"])
    sys.stdout.write(f"{table.to_string(index=False)}\n")
    for problem in (problem for f in found for problem in f.problems[:10]):
        sys.stdout.write(f"{problem}\n")
    if out is not None:
        table.to_csv(out, index=False)
    raise typer.Exit(int(any(f.problems for f in found)))


if __name__ == "__main__":
    typer.run(main)

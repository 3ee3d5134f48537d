"""`predict --keep` passes columns through, and `predict -` reads standard input."""

import csv
import io
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from algorithms.models.saved import load
from algorithms.privacy.card import build
from algorithms.privacy.card.text import statement
from data.card import DataRefusedError
from data.preparation import reader_in
from flows.cli.main import app
from tasks import predict as predicting
from tasks.kept_columns import spool_to_file, with_columns
from tasks.predict import predict, write
from tests.algorithms.privacy.conftest import KEY
from tests.support.refusals import refused_as
from tests.support.synthetic_run import record, write_run
from tests.support.trees import COLUMNS, HEADER, ROWS, write_model

IDS = [f"=id-{place}" for place in range(len(ROWS))]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model and rows with an undeclared column `id`, as CSV and as Parquet."""
    write_model(tmp_path, "logistic", cells=False, columns=COLUMNS)
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        csv.writer(file).writerows(
            [["id", *HEADER], *([name, *row] for name, row in zip(IDS, ROWS, strict=True))]
        )
    frame = pd.read_csv(tmp_path / "rows.csv", dtype={"grade": str, "member": str, "id": str})
    frame.to_parquet(tmp_path / "rows.parquet")
    return tmp_path


@pytest.mark.parametrize("name", ["rows.csv", "rows.parquet"])
def test_columns_of_the_file_stand_beside_the_predictions(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(predicting, "records_a_pass", lambda outputs: 2)
    for suffix in ("csv", "parquet"):
        to = folder / f"to.{suffix}"
        arguments = ["predict", str(folder / name), "--model", str(folder), "--to", str(to)]
        done = CliRunner().invoke(app, [*arguments, "--keep", "id", "--keep", "age"])
        assert done.exit_code == 0, done.output
        written = pd.read_csv(to) if suffix == "csv" else pd.read_parquet(to)
        assert list(written)[:4] == ["record", "id", "age", "predicted"]
        # no formula in a spreadsheet
        assert list(written["id"]) == ([f"'{one}" for one in IDS] if suffix == "csv" else IDS)
        assert list(written["predicted"]) == [
            one for some in predict(folder, folder / name) for one in some.predicted
        ]


@pytest.mark.parametrize(
    ("name", "keep", "code", "column"),
    [
        ("rows.csv", "ssn", "missing_column", "ssn"),
        ("rows.csv", "predicted", "columns_not_kept", "predicted"),
        ("x.npy", "id", "columns_not_kept", None),
    ],
)
def test_what_cannot_be_kept_is_refused(
    name: str, keep: str, code: str, column: str | None, folder: Path
) -> None:
    trained = load(folder)
    batches = predict(trained, folder / name)
    kept = with_columns(batches, folder / name, reader_in(trained.preparation), [keep])
    with refused_as(code, DataRefusedError, column=column):
        list(write(kept, trained.classes, io.StringIO()))


@pytest.mark.parametrize("kind", ["private", "seeded"])
def test_predictions_of_a_seeded_run_come_with_the_sentence_of_its_card(
    kind: Any, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    card = build(record(write_run(tmp_path_factory.mktemp("run"), kind=kind)), KEY)
    (folder / "privacy_card.json").write_bytes(card.to_bytes())
    arguments = ["predict", str(folder / "rows.csv"), "--model", str(folder), "--keep", "id"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert len(pd.read_csv(io.StringIO(done.stdout))) == len(ROWS)
    assert ("NOT PRIVATE" in done.stderr) is (statement(card) in done.stderr) is (kind == "seeded")
    to = folder / "predicted.parquet"
    assert CliRunner().invoke(app, [*arguments, "--to", str(to)]).exit_code == 0
    assert pq.read_schema(to).metadata[b"privacy"] == statement(card).encode()


@pytest.mark.parametrize("name", ["rows.csv", "rows.parquet"])
def test_records_come_from_standard_input(name: str, folder: Path) -> None:
    given = (folder / name).read_bytes()
    arguments = ["predict", "-", "--model", str(folder), "--keep", "id"]
    done = CliRunner().invoke(app, arguments, input=given)
    assert done.exit_code == 0, done.output
    written = pd.read_csv(io.StringIO(done.stdout))
    assert list(written["id"]) == [f"'{one}" for one in IDS]
    assert len(written) == len(ROWS)


def test_records_from_standard_input_that_a_killed_process_left_are_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with spool_to_file(io.BytesIO(b"age\n41\n")) as left:
        copied = left.parent.with_name(f"{left.parent.name}of-a-killed-process")
        shutil.copytree(left.parent, copied)  # nobody locks this one
        assert left.parent.stat().st_mode & 0o077 == 0
        with spool_to_file(io.BytesIO(b"age\n42\n")) as other:
            assert left.read_bytes() == b"age\n41\n" and other.read_bytes() == b"age\n42\n"
            assert not copied.exists()
    assert not list(tmp_path.iterdir())

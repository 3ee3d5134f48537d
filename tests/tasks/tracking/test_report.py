"""The report for Weights & Biases as the file it is offline: complete in words and tables, with panels of the runs."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from algorithms.privacy.card.text import SO_FAR, statement
from tasks.config.params import Tracking
from tasks.reporting import History, nothing
from tasks.reporting.figures import CostsByStep
from tasks.tracking.runs import FinishedRun, log_report, sections
from tests.support.offline_run import write_finished
from tests.support.tracked_run import HISTORY as PAST
from tests.support.tracked_run import finished

EMPTY = nothing()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    root = tmp_path_factory.mktemp("reported")
    write_finished(root)
    return finished(root)


@pytest.fixture(scope="module")
def document(run: FinishedRun, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("saved")
    path = log_report(run, PAST, Tracking(entity="a-team"), root=root)
    assert path == str(root / ".wandb" / f"report-{run.card.evidence.run_id}.json")
    found: dict[str, Any] = json.loads(Path(path).read_bytes())
    return found


def text_of(document: dict[str, Any], heading: str) -> str:
    """The markdown below a heading."""
    blocks = document["spec"]["blocks"]
    below = [block["children"][0].get("text") for block in blocks].index(heading) + 1
    assert blocks[below]["type"] == "markdown-block"
    return str(blocks[below]["content"])


def table(text: str) -> list[list[str]]:
    """The rows of a table in markdown, without its head."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [line[2:-2].replace("\\|", "¦").split(" | ") for line in lines[2:]]


NOISE = "| from step | releases | kind | sampling rate | clip norm | noise multiplier | noise std |"
HEADS = {
    "Privacy card": "|  |  |",
    "Epsilon over time": "| steps | epsilon so far |",
    "Epsilon by block": "| block | spent epsilon | cap epsilon | spent delta | cap delta | retired |",
    "Noise trace": NOISE,
    "Accuracy against epsilon": "| run | epsilon | accuracy on held-out records |",
    "Retraining history": "| period | outcome | run id | epsilon | accuracy | blocks |",
}
CARD = [
    "epsilon, delta",
    "protects",
    "not protected",
    "population",
    "its cap and what is left",
    "algorithm",
    "accountant",
    "noise",
    "run",
    "signed by",
]


def test_nothing_else_is_told(document: dict[str, Any]) -> None:
    heads = {name: [line for line in text_of(document, name).splitlines() if "|" in line] for name in HEADS}
    assert {name: lines[0] for name, lines in heads.items()} == HEADS
    assert [name for name, _ in table(text_of(document, "Privacy card"))] == CARD
    kinds = [block["type"] for block in document["spec"]["blocks"]]
    assert (kinds.count("heading"), kinds.count("markdown-block")) == (len(HEADS), len(HEADS))


def test_the_card_is_told_in_words(document: dict[str, Any], run: FinishedRun) -> None:
    text, card = text_of(document, "Privacy card"), run.card
    rows = dict(table(text))
    assert text.startswith(statement(card))
    assert rows["epsilon, delta"] == f"{card.setting.epsilon:.6g}, 1e-05"
    assert rows["signed by"] == card.signature.public_key
    assert rows["its cap and what is left"].startswith("epsilon 10, delta 0.0001; epsilon ")


def test_the_tables_have_what_the_run_and_the_ledger_know(document: dict[str, Any], run: FinishedRun) -> None:
    """The noise has a row for each run of equal releases."""
    own = [run.card.evidence.run_id, f"{run.card.setting.epsilon:.6g}", "0.8"]
    first, failed = (
        "20260101T030000-11111111",
        ["2026-W02", "failed ¦ twice", "–", "–", "–", "2026-W01, 2026-W02"],
    )
    tables = {
        "Epsilon over time": [["10", "0.5"], ["30", f"{run.curve.epsilon[-1]:.6g}"]],
        "Epsilon by block": [
            ["2026-W01", "0.75", "2", "1e-06", "1e-05", "no"],
            ["2026-W02", "2", "2", "2e-06", "1e-05", "yes"],
        ],
        "Accuracy against epsilon": [[first, "0.75", "0.625"], own],
        "Retraining history": [["2026-W01", "promoted", first, "0.75", "0.625", "2026-W01"], failed],
    }
    assert {heading: table(text_of(document, heading)) for heading in tables} == tables
    noise = table(text_of(document, "Noise trace"))
    assert [row[:3] for row in noise] == [["1", "1", "total"], ["1", "30", "gradient"]]
    assert noise[1][3:] == ["0.1", "0.5", "1.5", "0.75"]


def test_the_curves_are_of_this_run_and_the_scatter_of_all_trainings(
    document: dict[str, Any], run: FinishedRun
) -> None:
    found = [json.dumps(grid["runSets"][0]["filters"]) for grid in grids(document)]
    assert ["train" in text for text in found] == [True, True, True]
    assert [run.card.evidence.run_id in text for text in found] == [True, True, False]
    (line,), noise, (scatter,) = panels(document)
    assert (line["viewType"], line["config"]["xAxis"]) == ("Run History Line Plot", "privacy/step")
    metrics = [panel["config"]["metrics"] for panel in (line, *noise)]
    assert metrics == [
        ["privacy/epsilon", "privacy/epsilon_so_far"],
        ["privacy/noise_std/total", "privacy/noise_std/gradient"],
        ["privacy/noise_multiplier/total", "privacy/noise_multiplier/gradient"],
    ]
    axes = tuple(scatter["config"][name] for name in ("xAxis", "yAxis"))
    assert scatter["viewType"] == "Scatter Plot"
    assert axes == ("summary:privacy/epsilon_total", "summary:test/accuracy")


def test_a_run_that_was_a_retraining_is_told_once(run: FinishedRun) -> None:
    own = PAST.retrainings.assign(run_id=run.card.evidence.run_id)
    assert len(table(sections(run, History(PAST.blocks, own))["accuracy"][1])) == 1


def test_without_a_past_the_report_says_so(run: FinishedRun) -> None:
    told = sections(run, EMPTY)
    assert told["blocks"][1] == "The ledger told of no blocks."
    assert told["retrainings"][1] == "There was no scheduled retraining yet."
    assert len(table(told["accuracy"][1])) == 1


def test_report_on_adaptive_releases_says_what_epsilon_so_far_is_not(
    run: FinishedRun,
) -> None:
    assert SO_FAR not in sections(run, EMPTY)["epsilon"][1]
    accounting = run.card.accounting
    chosen = accounting.composition.model_copy(update={"kind": "zcdp", "rho": 0.1})
    card = run.card.model_copy(update={"accounting": accounting.model_copy(update={"composition": chosen})})
    assert sections(replace(run, card=card), EMPTY)["epsilon"][1].endswith(SO_FAR)


def test_a_report_on_a_run_without_noise_has_no_number_for_epsilon(run: FinishedRun) -> None:
    told = sections(replace(run, curve=CostsByStep([], [])), EMPTY)
    assert told["epsilon"][1] == "There is no noise, so epsilon is infinite."


def test_long_histories_are_cut_and_long_traces_thinned(run: FinishedRun) -> None:
    many = pd.concat([PAST.retrainings] * 50, ignore_index=True)
    trace = pd.concat([run.trace.tail(1)] * 500, ignore_index=True)
    trace = trace.assign(step=range(500), noise_std=np.linspace(1.0, 2.0, 500))
    told = sections(replace(run, trace=trace), History(PAST.blocks, many))
    assert told["retrainings"][1].endswith("76 earlier rows are not shown.")
    rows = table(told["noise"][1])
    assert (len(rows), rows[0][0], rows[-1][0]) == (24, "1", "500")


def test_a_failure_is_one_line_and_no_loss(
    run: FinishedRun, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / ".wandb").write_text("in the way of the folder")
    with caplog.at_level(logging.WARNING):
        assert log_report(run, PAST, Tracking(), root=tmp_path) is None
    (line,) = caplog.messages
    assert line.startswith("W&B did not log the report")


def grids(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [block["metadata"] for block in document["spec"]["blocks"] if block["type"] == "panel-grid"]


def panels(document: dict[str, Any]) -> list[list[dict[str, Any]]]:
    return [grid["panelBankSectionConfig"]["panels"] for grid in grids(document)]

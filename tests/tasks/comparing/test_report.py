"""What a comparison leaves: tables, figures, the page, published numbers beside ours, and the group in W&B."""

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import wandb

from tasks.comparing.definition import read_published
from tasks.comparing.report import (
    METRIC_COLUMNS,
    ComparisonReport,
    draw_by_epsilon,
    join_published,
    log_comparison,
    published_table,
    report,
    result_tables,
    results,
    summary,
    with_gap,
)
from tasks.comparing.work import ComparisonWork
from tasks.config.params import ParamsRefusedError
from tasks.reporting.figures import LIGHT
from tests.support.browser import seen
from tests.support.comparisons import document, run_here, small
from tests.support.offline_run import read_records
from tests.support.refusals import refused_as

PUBLISHED = """figure,dataset,model,method,setting,epsilon,metric,value
1,digits,softmax,dp_sgd,,4.0,accuracy,0.5
1,digits,softmax,plain,,,objective,2.0
2,adult,svm,dp_sgd,,4.0,accuracy,0.8
"""


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> ComparisonWork:
    root = small(tmp_path_factory.mktemp("reported") / "checkout")
    (root / "published.csv").write_text(PUBLISHED)
    return run_here(root, document() | {"seeds": 3, "published": "published.csv"})


@pytest.fixture(scope="module")
def done(work: ComparisonWork) -> ComparisonReport:
    return report(work, refused=["dp_sgd on <digits>: too few records"])


def test_the_tables_are_written_and_agree(work: ComparisonWork, done: ComparisonReport) -> None:
    assert len(done.table) == 9
    written = pd.read_parquet(work.workspace.folder / "results.parquet")
    pd.testing.assert_frame_equal(written, done.table)
    as_text = pd.read_csv(work.workspace.folder / "results.csv", keep_default_na=True)
    np.testing.assert_allclose(as_text["objective"], done.table["objective"], rtol=1e-12)
    assert list(pd.read_csv(work.workspace.folder / "summary.csv")["n"]) == [3, 3, 3]


def test_a_summary_has_mean_deviation_and_standard_error(done: ComparisonReport) -> None:
    rows = done.table[(done.table["method"] == "dp_sgd") & (done.table["epsilon"] == 4.0)]
    (total,) = done.totals[done.totals["epsilon"] == 4.0].to_dict("records")
    there = [name for name in METRIC_COLUMNS if name in rows]
    assert there[:2] == ["accuracy", "test_loss"]  # what other targets are measured by is left out
    for metric in there:
        values = rows[metric].to_numpy()
        assert total[f"{metric}_mean"] == pytest.approx(values.mean())
        assert total[f"{metric}_std"] == pytest.approx(values.std(ddof=1))
        assert total[f"{metric}_stderr"] == pytest.approx(values.std(ddof=1) / np.sqrt(3))


def test_a_single_trial_has_no_standard_error(done: ComparisonReport) -> None:
    alone = summary(done.table.iloc[:1])
    assert alone["accuracy_stderr"].isna().all()
    (table,) = [table for table in result_tables(alone) if table.title.startswith("Accuracy")]
    assert table.rows == [["DP-SGD", f"{100 * done.table['accuracy'].iloc[0]:.2f}%"]]


def test_methods_are_down_and_epsilons_across(done: ComparisonReport) -> None:
    accuracy, objective = result_tables(done.totals)
    assert accuracy.title == "Accuracy on the test records: digits, softmax"
    assert accuracy.header == ["method", "epsilon 1", "epsilon 4"]
    assert [row[0] for row in accuracy.rows] == ["DP-SGD", "plain"]
    assert all(" ± " in text for text in accuracy.rows[0][1:])
    assert objective.title.startswith("Objective")


@pytest.mark.parametrize("name", ["report.html", "page.md"])
def test_a_page_shows_accuracies_in_percent_and_their_errors_in_points(
    work: ComparisonWork, done: ComparisonReport, name: str
) -> None:
    text = (work.workspace.folder / name).read_text()
    for total in done.totals[done.totals["method"] == "dp_sgd"].to_dict("records"):
        mean, error = 100 * total["accuracy_mean"], 100 * total["accuracy_stderr"]
        assert f"{mean:.2f}% ± {error:.2f}" in text
        assert f"{total['accuracy_mean']:.4f}" not in text
        assert f"{total['objective_mean']:.5f} ± {total['objective_stderr']:.5f}" in text
    assert "in percentage points" in " ".join(text.split())


@pytest.mark.parametrize(("width", "dark"), [(390, True), (1200, False)])
def test_the_page_is_readable_at_any_width(
    work: ComparisonWork, done: ComparisonReport, tmp_path: Path, width: int, dark: bool
) -> None:
    assert len(done.pictures) > 1
    found = seen((work.workspace.folder / "report.html").read_text(), tmp_path, width=width, dark=dark)
    assert found.texts > 20
    assert (found.wide, found.faint, found.small, found.complaints) == (0, [], [], [])


@pytest.mark.parametrize(("metric", "tick"), [("accuracy", "40.0%"), ("perplexity", "0.4")])
def test_the_axis_of_an_accuracy_is_in_percent(metric: str, tick: str) -> None:
    total = {"dataset": "digits", "model": "softmax", "label": "DP-SGD", "epsilon": [1.0, 4.0]}
    totals = pd.DataFrame(total | {f"{metric}_mean": [0.2, 0.6], f"{metric}_stderr": 0.01})
    axes = draw_by_epsilon(totals, metric, LIGHT, words=metric).axes[0]
    axes.set_yticks([0.2, 0.4, 0.6])
    assert axes.yaxis.get_major_formatter().format_ticks([0.2, 0.4, 0.6])[1] == tick


def test_a_gap_is_to_the_least_on_the_same_records() -> None:
    same = {"dataset": "a", "model": "m", "repeat": 0}
    curves = pd.DataFrame(
        [
            same | {"fold": fold, "objective": value}
            for fold, value in ((0, 3.0), (0, 1.0), (1, 5.0), (1, 4.0))
        ]
    )
    assert with_gap(curves)["gap"].tolist() == [2.0, 0.0, 1.0, 0.0]


def test_figures_are_drawn_for_windows_and_phones_and_kept_as_files(
    work: ComparisonWork, done: ComparisonReport
) -> None:
    assert set(done.pictures) == {"accuracy", "objective", "convergence", "noise"}
    for name, picture in done.pictures.items():
        assert (work.workspace.folder / f"{name}.png").read_bytes() == picture.wide
        assert picture.wide.startswith(b"\x89PNG")
        assert picture.wide != picture.narrow


def test_the_page_needs_nothing_else_and_says_what_it_must(
    work: ComparisonWork, done: ComparisonReport
) -> None:
    page = (work.workspace.folder / "report.html").read_text()
    assert not re.search(r"(src|href)=\"(?!data:)", page)
    assert page.count("data:image/png") == 2 * len(done.pictures)  # wide and narrow
    for words in (
        "not private",
        "9 runs",
        "not charged",
        "A tiny comparison",
        "Published numbers beside ours",
    ):
        assert words in page
    assert "dp_sgd on &lt;digits&gt;: too few records" in page
    assert ":root { color-scheme" in page


def test_the_markdown_page_shows_the_figures_beside_it(work: ComparisonWork, done: ComparisonReport) -> None:
    page = (work.workspace.folder / "page.md").read_text()
    for name in re.findall(r"\]\((.*?)\)", page):
        assert (work.workspace.folder / name).is_file()
    assert page.count("](") == len(done.pictures)
    rows = [line for line in page.splitlines() if line.startswith("| DP-SGD |")]
    assert len(rows) == 2
    assert all(line.count("|") == 4 for line in rows)


def test_published_numbers_stand_beside_ours(work: ComparisonWork, done: ComparisonReport) -> None:
    rows = join_published(read_published(work.workspace.root / "published.csv"), done.totals)
    ours = done.totals[done.totals["epsilon"] == 4.0]["accuracy_mean"].iloc[0]
    assert rows["ours"].iloc[0] == ours
    assert rows["difference"].iloc[0] == pytest.approx(ours - 0.5)
    assert rows["ours"].notna().tolist() == [True, True, False]
    shown = published_table(rows).rows
    assert shown[0][5] == "50.00%"
    assert shown[0][7] == f"{100 * (ours - 0.5):+.2f} points"
    assert shown[1][5] == "2"
    assert shown[2][6] == "not run"


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("figure,value\n1,2\n", {"metric": None, "column": None}),
        (PUBLISHED.replace("accuracy", "beauty"), {"metric": "beauty"}),
        (PUBLISHED.replace("0.5", "half"), {"column": "value", "value": "half"}),
        (PUBLISHED.replace("0.5", "inf"), {"column": "value", "value": "inf"}),
    ],
)
def test_published_numbers_that_are_none_are_refused(
    tmp_path: Path, text: str, fields: dict[str, object]
) -> None:
    path = tmp_path / "numbers.csv"
    path.write_text(text)
    with refused_as("bad_published", ParamsRefusedError, **fields):
        read_published(path)


def test_results_name_the_files_labels_of_today(work: ComparisonWork, done: ComparisonReport) -> None:
    changed = [type(trial)(**(vars(trial) | {"label": "renamed"})) for trial in work.trials]
    assert set(results(work.workspace, tuple(changed))["label"]) == {"renamed"}


@pytest.fixture(scope="module")
def logged(work: ComparisonWork, done: ComparisonReport) -> list[list[Any]]:
    """The records of each run of the group."""
    root = work.workspace.root
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("WANDB_")]:
            patch.delenv(name)
        patch.setenv("HOME", str(root / "home"))
        assert log_comparison(work, done)
        wandb.teardown()
    files = sorted(path for path in root.rglob("run-*.wandb") if path.is_file())
    return [list(read_records(path.read_bytes())) for path in files]


def _of(records: list[Any], kind: str) -> list[Any]:
    return [getattr(record, kind) for record in records if record.WhichOneof("record_type") == kind]


def _keys(items: Any) -> set[str]:
    return {str(item.key or item.nested_key[0]) for item in items} - {
        "_step",
        "_runtime",
        "_timestamp",
        "_wandb",
    }


def test_a_comparison_is_a_group_with_a_run_a_method_and_a_summary(logged: list[list[Any]]) -> None:
    runs = [run for records in logged for run in _of(records, "run")]
    assert {run.run_group for run in runs} == {"tiny"}
    assert {run.job_type for run in runs} == {"dp_sgd", "plain", "summary"}
    for run in runs:
        keys = _keys(run.config.update)
        own = set() if run.job_type == "summary" else {"method", "labels", "algorithm"}
        assert keys == {"comparison", "title", "private"} | own
        private = next(item for item in run.config.update if item.key == "private")
        assert json.loads(private.value_json) is False


def test_the_group_has_tables_figures_and_the_results_as_an_artifact(logged: list[list[Any]]) -> None:
    figures = {f"figures/{name}" for name in ("accuracy", "objective", "convergence", "noise")}
    for records in logged:
        (run,) = _of(records, "run")
        keys = {key for row in _of(records, "history") for key in _keys(row.item)}
        assert keys == {"results", "summary", *(figures if run.job_type == "summary" else ())}
        summary_keys = {key for row in _of(records, "summary") for key in _keys(row.update)}
        assert summary_keys == {"cells", "runs", *keys}
        made = [artifact for artifact in _of(records, "artifact") if artifact.type == "comparison"]
        assert len(made) == (run.job_type == "summary")
        for artifact in made:
            assert {entry.path for entry in artifact.manifest.contents} == {
                *("results.parquet", "results.csv", "summary.csv", "report.html", "page.md")
            }

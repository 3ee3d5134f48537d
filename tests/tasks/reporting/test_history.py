"""The report's pictures have the numbers they are drawn from; what was before a run, and how the page shows it."""

import base64
import dataclasses
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.patches import Rectangle
from matplotlib.text import Text
from matplotlib.ticker import PercentFormatter

from algorithms.core.receipt import account_of
from algorithms.privacy.accounting import Budget
from algorithms.privacy.documents import Receipt
from algorithms.privacy.ledger import Ledger
from tasks.report import report
from tasks.reporting import (
    BLOCKS,
    RETRAININGS,
    History,
    drawings,
    environment,
    history,
    history_variables,
    nothing,
)
from tasks.reporting.figures import (
    LIGHT,
    THIS_RUN,
    CostsByStep,
    Picture,
    Theme,
    blocks_figure,
    class_figure,
    confusion_figure,
    epsilon_figure,
    noise_figure,
    png,
    quality_figure,
    retrainings_figure,
)
from tasks.retraining import RetrainingState, RetrainingStates, StateKind
from tests.support.synthetic_run import CLASSES, DELTA, Folders, read_json, write_json, write_run

RUN = f"{'0a1b2c3d' * 8}-1"
EARLIER: list[tuple[str, StateKind, float | None]] = [
    ("2026-W01", "promoted", 0.7),
    ("2026-W02", "kept", 0.65),
    ("2026-W03", "forfeited", None),
]


def charge(ledger: Ledger, run_id: str, epsilon: float, week: str, *, forfeits: bool = False) -> None:
    cost, notes = Budget(epsilon, DELTA), {"retraining": f"visits {week}"}
    ledger.reserve(run_id, "painters", cost, events=[], notes=notes, blocks=["w1", "w2"])
    if forfeits:
        ledger.forfeit(run_id)
    else:
        ledger.settle(run_id, cost, events=[])


def keep(root: Path, home: Path, week: str, kind: StateKind, epsilon: float, accuracy: float | None) -> None:
    """Leaves what a retraining leaves of a period: its state, and its model's metrics."""
    states = RetrainingStates(home / "retrainings" / "visits")
    states.folder.mkdir(parents=True, exist_ok=True)
    number = len(states.all()) + 1
    states.write(
        RetrainingState(week, str(root), "", "", ("w1", "w2"), epsilon, kind, "", f"run of {week}", number)
    )
    if accuracy is not None:
        folder = root / "models" / "visits" / f"run of {week}"
        folder.mkdir(parents=True)
        write_json(folder / "metrics.json", {"epsilon": epsilon, "test_accuracy": accuracy})


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return write_run(tmp_path_factory.mktemp("run"))


@pytest.fixture
def ledger(own_home: Path) -> Ledger:
    return Ledger.open(f"sqlite:///{own_home}/ledger.sqlite")


@pytest.fixture
def retrained(tmp_path: Path, own_home: Path, ledger: Ledger, written: Folders) -> Folders:
    """A run that is the retraining of a fourth week on the second and third of three blocks; the first is retired."""
    shutil.copytree(written.artifacts.parent, tmp_path, dirs_exist_ok=True)
    folders = Folders(tmp_path / "artifacts", tmp_path / "datasets" / "prepared")
    (tmp_path / "params.yaml").write_text("data: {dataset: digits}\n")
    path = folders.artifacts / "receipt.json"
    receipt = read_json(path)
    ledger.declare("painters", Budget(9.0, 1e-3), public=False)
    for block in ("w1", "w2", "w3"):
        ledger.declare_block("painters", block)
    for number, (week, kind, accuracy) in enumerate(EARLIER):
        charge(ledger, f"run of {week}", 0.5 + number / 4, week, forfeits=kind == "forfeited")
        keep(tmp_path, own_home, week, kind, 0.5 + number / 4, accuracy)
    ledger.retire_block("painters", "w1")
    cost, notes = Budget(receipt["epsilon"]["pld"], DELTA), {"retraining": "visits 2026-W04"}
    ledger.reserve(RUN, "painters", cost, events=receipt["events"], notes=notes, blocks=["w2", "w3"])
    ledger.settle(RUN, cost, events=receipt["events"])
    write_json(
        path, receipt | {"ledger": account_of(ledger, "painters", RUN).model_dump(), "blocks": ["w2", "w3"]}
    )
    return folders


def collected(folders: Folders, ledger: Ledger) -> History:
    receipt = Receipt.read(folders.artifacts / "receipt.json")
    metrics = read_json(folders.artifacts / "metrics.json")
    home, root = Path(os.environ["EPSILONFLOW_HOME"]), folders.artifacts.parent
    return history(receipt, metrics, ledger=ledger, home=home, root=root)


def test_blocks_and_retrainings_are_what_the_ledger_and_the_models_say(
    retrained: Folders, ledger: Ledger
) -> None:
    found, cost = collected(retrained, ledger), read_json(retrained.artifacts / "metrics.json")["epsilon"]
    assert list(found.blocks.columns) == [
        *("block", "spent_epsilon", "spent_delta", "cap_epsilon", "cap_delta", "retired")
    ]
    assert found.blocks["block"].tolist() == ["w1", "w2", "w3"]
    assert found.blocks["spent_epsilon"].tolist() == pytest.approx([2.25, 2.25 + cost, cost])
    assert found.blocks["cap_epsilon"].tolist() == [9.0] * 3
    assert found.blocks["retired"].tolist() == [True, False, False]
    rows = found.retrainings
    assert list(rows.columns) == ["period", "outcome", "run_id", "epsilon", "quality", "blocks"]
    assert rows["period"].tolist() == ["2026-W01", "2026-W02", "2026-W03", "2026-W04"]
    assert rows["outcome"].tolist() == ["promoted", "kept", "forfeited", "this run"]
    assert rows["epsilon"].tolist() == pytest.approx([0.5, 0.75, 1.0, cost])
    np.testing.assert_array_equal(rows["quality"], [0.7, 0.65, np.nan, 0.8])
    assert rows["blocks"].iloc[-1] == "w2, w3"


def test_what_came_later_changes_nothing(retrained: Folders, ledger: Ledger, tmp_path: Path) -> None:
    before = collected(retrained, ledger)
    ledger.declare_block("painters", "w4")
    ledger.retire_block("painters", "w2")
    ledger.set_cap("painters", Budget(20.0, 1e-3), block="w3")
    home = Path(os.environ["EPSILONFLOW_HOME"])
    keep(tmp_path, home, "2026-W04", "promoted", 1.0, None)
    keep(tmp_path, home, "2026-W05", "promoted", 1.0, 0.9)
    after = collected(retrained, ledger)
    pd.testing.assert_frame_equal(before.blocks, after.blocks)
    pd.testing.assert_frame_equal(before.retrainings, after.retrainings)


def test_periods_stand_in_the_order_in_which_they_began(
    retrained: Folders, ledger: Ledger, tmp_path: Path, own_home: Path
) -> None:
    """After a clock was set back, and where periods have another length now, their names do not sort by time."""
    keep(tmp_path, own_home, "2026-W50", "kept", 1.0, 0.6)
    keep(tmp_path, own_home, "2026-W04", "open", 1.0, None)
    weeks = ["2026-W01", "2026-W02", "2026-W03", "2026-W50", "2026-W04"]
    assert collected(retrained, ledger).retrainings["period"].tolist() == weeks


def test_a_ledger_that_does_not_know_the_run_leaves_the_blocks_of_the_receipt(
    retrained: Folders, ledger: Ledger, tmp_path: Path
) -> None:
    known = collected(retrained, ledger).blocks
    found = collected(retrained, Ledger.open(f"sqlite:///{tmp_path}/other.sqlite"))
    assert found.retrainings.empty
    pd.testing.assert_frame_equal(found.blocks, known.iloc[1:].reset_index(drop=True))


def test_the_page_shows_the_history_and_keeps_its_pictures_to_itself(retrained: Folders) -> None:
    root = retrained.artifacts.parent
    made = report(artifacts=retrained.artifacts, prepared=retrained.prepared, root=root)
    text = " ".join((retrained.artifacts / "report.html").read_text(encoding="utf-8").split())
    assert made.history.retrainings["run_id"].iloc[-1] == RUN
    assert "This run read 2 of 3 blocks; 1 is retired for ever." in text
    assert "Until then that of 2026-W01 serves." in text
    assert "given up; all of it counts as spent" in text
    assert text.count("<picture>") == 8
    assert 'alt="Epsilon spent on each of 3 blocks' in text
    assert 'alt="Held-out accuracy of 3 models over 4 periods' in text
    plots = {path.name for path in (retrained.artifacts / "plots").glob("*.png")}
    assert plots == {"epsilon.png", "risk.png", "noise.png", "confusion.png", "per_class.png"}


def test_the_page_says_what_of_the_recipe_changed_and_was_accepted(
    retrained: Folders, own_home: Path
) -> None:
    states, root = RetrainingStates(own_home / "retrainings" / "visits"), retrained.artifacts.parent
    changes = "algorithm.steps is 2 and was 300; model.name is <b> and was logistic"
    state = RetrainingState(
        "2026-W04", str(root), "", "", ("w2", "w3"), 1.0, "open", number=4, changes=changes
    )
    states.write(state)
    report(artifacts=retrained.artifacts, prepared=retrained.prepared, root=root)
    text = " ".join((retrained.artifacts / "report.html").read_text(encoding="utf-8").split())
    assert (
        "algorithm.steps is 2 and was 300; model.name is &lt;b&gt; and was logistic. This was accepted"
        in text
    )
    states.write(dataclasses.replace(state, changes=""))
    report(artifacts=retrained.artifacts, prepared=retrained.prepared, root=root)
    assert "This was accepted" not in (retrained.artifacts / "report.html").read_text(encoding="utf-8")


def some_blocks(count: int, cap: float = 6.0) -> pd.DataFrame:
    spent = np.linspace(6.0, 1.0, count)
    rows = [(f"2026-W{place}", value, 1e-5, cap, 1e-5, place == 0) for place, value in enumerate(spent)]
    return pd.DataFrame(rows, columns=list(BLOCKS))


@pytest.mark.parametrize("count", [2, 200])
def test_each_block_is_a_bar_under_its_cap(count: int) -> None:
    blocks = some_blocks(count)
    axes = blocks_figure(blocks, theme=LIGHT).axes[0]
    bars = sorted((bar for bar in axes.patches if isinstance(bar, Rectangle)), key=lambda bar: bar.get_x())
    assert [bar.get_height() for bar in bars] == blocks["spent_epsilon"].tolist()
    assert bars[0].get_facecolor() != bars[1].get_facecolor() == bars[-1].get_facecolor()
    assert set(np.asarray(axes.lines[0].get_ydata())) == {6.0}
    labels = [label.get_text() for label in axes.get_xticklabels()]
    assert len(labels) == min(count, 10)
    assert labels[-1] == f"2026-W{count - 1}"


def test_a_cap_far_above_is_named_and_leaves_the_bars_to_be_seen() -> None:
    axes = blocks_figure(some_blocks(3, cap=1e6), theme=LIGHT).axes[0]
    assert axes.get_ylim()[1] < 10
    assert "cap 1,000,000, far above" in axes.get_legend_handles_labels()[1]


def some_retrainings(count: int) -> pd.DataFrame:
    rows = [(f"2026-W{n:02}", "promoted", f"run {n}", 1.0 + n, 0.5 + n / 100, "w1") for n in range(count - 1)]
    return pd.DataFrame([*rows, ("2026-W60", THIS_RUN, "run", 9.0, 0.9, "w2")], columns=list(RETRAININGS))


def test_a_retraining_without_a_model_has_a_cost_and_no_accuracy() -> None:
    rows = some_retrainings(4)
    rows.loc[1, ["outcome", "quality"]] = ["forfeited", np.nan]
    above, below = retrainings_figure(rows, theme=LIGHT).axes
    assert np.asarray(above.lines[0].get_xdata()).tolist() == [0, 2, 3]
    heights = {
        round(bar.get_x() + 0.3): bar.get_height() for bar in below.patches if isinstance(bar, Rectangle)
    }
    assert heights == {0: 1.0, 1: 2.0, 2: 3.0, 3: 9.0}
    assert below.get_legend_handles_labels()[1] == ["of a model", "spent without a model"]
    axes = quality_figure(rows.dropna(), theme=LIGHT).axes[0]
    points = [points.get_offsets().tolist() for points in axes.collections]
    assert points == [[[1.0, 0.5], [3.0, 0.52]], [[9.0, 0.9]]]


def test_explained_variance_is_in_percent_as_on_a_runs_page() -> None:
    past = History(nothing().blocks, some_retrainings(4), metric="r2")
    draw, words = drawings(past)["retrainings"]
    assert words.startswith("Held-out r2 of 4 models over 4 periods, from 50.0% to 90.0%")
    assert isinstance(draw(LIGHT).axes[0].yaxis.get_major_formatter(), PercentFormatter)
    (row, *_) = history_variables(past, read=1)["retrainings"]  # type: ignore[misc]
    assert row["quality"] == "90.0%"


def test_what_is_no_share_is_called_by_its_name_and_is_in_no_percent() -> None:
    past = History(nothing().blocks, some_retrainings(4), metric="micro f1")
    (draw, words), (_, against) = drawings(past)["retrainings"], drawings(past)["quality"]
    assert words.startswith("Held-out micro f1 of 4 models over 4 periods, from 0.500 to 0.900")
    axes = draw(LIGHT).axes[0]
    assert axes.get_ylabel() == "held-out micro f1" and against.startswith("Held-out micro f1")
    axes = quality_figure(past.retrainings, metric="micro f1", theme=LIGHT).axes[0]
    assert not isinstance(axes.yaxis.get_major_formatter(), PercentFormatter)
    (row, *_) = history_variables(past, read=1)["retrainings"]  # type: ignore[misc]
    assert row["quality"] == "0.900"


def test_what_there_is_nothing_of_is_not_drawn() -> None:
    assert drawings(nothing()) == {}
    assert set(drawings(History(some_blocks(2), some_retrainings(1)))) == {"blocks"}
    same = some_retrainings(3).assign(epsilon=1.0)
    assert set(drawings(History(nothing().blocks, same))) == {"retrainings"}


def test_the_table_has_the_last_periods_and_says_how_many_were_before() -> None:
    said = history_variables(History(some_blocks(2), some_retrainings(40)), read=1)
    rows = said["retrainings"]
    assert isinstance(rows, list)
    assert [rows[0]["became"], rows[1]["became"], rows[2]["became"]] == [
        THIS_RUN,
        "its model serves",
        "its model served",
    ]
    assert (len(rows), said["earlier"], said["serving"]) == (12, 28, "2026-W38")
    assert json.dumps(rows[0]) == (
        '{"period": "2026-W60", "became": "this run", "epsilon": "9", "quality": "90.0%", "blocks": "w2"}'
    )


def test_pictures_show_the_numbers() -> None:
    classes = pd.DataFrame({"class": list(CLASSES), "accuracy": [0.5, 0.25, np.nan], "records": [4, 4, 0]})
    bars = class_figure(classes, overall=0.4, theme=LIGHT).axes[0]
    assert [bar.get_width() for bar in bars.patches if isinstance(bar, Rectangle)] == [0.5, 0.25, 0.0]
    assert np.asarray(bars.lines[0].get_xdata())[0] == 0.4
    pairs = pd.DataFrame({"actual": ["cat", "cat", "dog"], "predicted": ["cat", "owl", "dog"]})
    shares = confusion_figure(pairs, CLASSES, theme=LIGHT).axes[0].images[0].get_array()
    assert shares is not None
    assert shares.tolist() == [[0.5, 0.0, 0.5], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]
    cells = pairs.assign(count=[3, 1, 2])
    shares = confusion_figure(cells, CLASSES, theme=LIGHT).axes[0].images[0].get_array()
    assert shares is not None
    assert shares.tolist() == [[0.75, 0.0, 0.25], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]
    allowed, spent = epsilon_figure(CostsByStep([1, 2], [0.5, 0.7]), target=1.0, theme=LIGHT).axes[0].lines
    assert np.asarray(spent.get_ydata()).tolist() == [0.5, 0.7]
    assert np.asarray(allowed.get_ydata())[0] == 1.0


MARGINS = 2 * 16 + 2 * 1.2 * 17
PHONE, PAGE = 390 - MARGINS, 32 * 16 + 1 - MARGINS
"""CSS pixels of a picture: the window without the margins of page and section, on a phone and from where it is wide."""


@pytest.mark.parametrize("theme", [LIGHT, LIGHT.narrow], ids=["page", "phone"])
def test_texts_of_pictures_have_eleven_pixels_where_they_are_shown(theme: Theme) -> None:
    classes = pd.DataFrame({"class": list(CLASSES), "accuracy": [0.5, 0.25, 0.1], "records": [4, 4, 9]})
    pairs = pd.DataFrame({"actual": ["cat", "cat", "dog"], "predicted": ["cat", "owl", "dog"]})
    trace = pd.DataFrame({"kind": ["gradient"] * 3, "step": [0, 1, 2], "noise_std": [0.5, 0.5, 60.0]})
    curve = CostsByStep([1, 2], [0.5, 0.7])
    pixels = PHONE if theme.is_narrow else PAGE
    for figure in (
        class_figure(classes, overall=0.4, theme=theme),
        confusion_figure(pairs, CLASSES, theme=theme),
        epsilon_figure(curve, target=1.0, theme=theme),
        noise_figure(trace, theme=theme),
        blocks_figure(some_blocks(30), theme=theme),
    ):
        scale = pixels / (72 * figure.get_figwidth())
        png(figure)
        sizes = [text.get_fontsize() * scale for text in figure.findobj(Text) if text.get_text()]
        assert len(sizes) > 4 and min(sizes) >= 11


def test_axes_say_where_they_do_not_begin_at_zero() -> None:
    trace = pd.DataFrame({"kind": ["gradient"] * 3, "step": [0, 1, 2], "noise_std": [0.5, 0.5, 60.0]})
    (axes,) = (figure := noise_figure(trace, theme=LIGHT)).axes
    png(figure)
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("training steps", "noise on the sum (std)\nlog scale")
    rows = pd.DataFrame({"outcome": ["kept"] * 2, "epsilon": [1.0, 1.1], "quality": [0.8, 0.81]})
    (axes,) = (figure := quality_figure(rows, theme=LIGHT)).axes
    png(figure)
    assert axes.get_xlabel() == "epsilon of the run, not from 0"
    assert axes.get_ylabel() == "held-out accuracy\nnot from 0"


def test_a_page_shows_a_phone_the_picture_that_was_drawn_for_it() -> None:
    drawn = Picture(b"wide", b"narrow", "words")
    macros: Any = environment().get_template("picture.html.j2").module
    macro = str(macros.drawn(drawn))
    ((source, media),) = re.findall(r'<source srcset="([^"]+)" media="([^"]+)"', macro)
    assert (media, source.endswith(base64.b64encode(drawn.narrow).decode())) == ("(max-width: 32rem)", True)
    (other,) = re.findall(r'<img src="([^"]+)"', macro)
    assert other.endswith(base64.b64encode(drawn.wide).decode())


def test_pictures_are_the_same_bytes_again() -> None:
    trace = pd.DataFrame({"kind": ["gradient"] * 3, "step": [0, 1, 2], "noise_std": [0.5, 0.5, 0.6]})
    first, second = (png(noise_figure(trace, theme=LIGHT)) for _ in range(2))
    assert first == second


def test_a_cost_so_far_that_is_no_bound_is_drawn_apart() -> None:
    curve = CostsByStep([1, 2], [0.2, 0.3])
    fixed, chosen = (
        epsilon_figure(curve, target=1.0, theme=LIGHT, is_fixed=is_fixed).axes[0]
        for is_fixed in (True, False)
    )
    assert [line.get_label() for line in fixed.lines][1:] == ["spent so far"]
    assert [line.get_label() for line in chosen.lines][1:] == ["added up so far, no bound for ending there"]

"""What a class, a file, a population or a method is called stays text in all that a run and a command show."""

import csv
import io
import logging
import re
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from markdown_it import MarkdownIt
from matplotlib import rc_context
from typer.testing import CliRunner

from algorithms.errors import RefusedError
from algorithms.plain_text import from_csv, visible
from algorithms.privacy.accounting import Budget
from algorithms.privacy.card import load, verify
from algorithms.privacy.card.build import build
from algorithms.privacy.card.text import markdown
from algorithms.privacy.ledger import Ledger
from flows import deployed
from flows.cli.main import app
from flows.cli.running import StageOutput
from tasks import evaluate, report
from tasks.comparing import report as comparison
from tasks.comparing.work import ComparisonWork
from tasks.csv_files import read_csv, write_csv
from tasks.export import release
from tasks.ledger_page import page as ledger_page
from tasks.predict import Predictions, write
from tasks.preflight.rehearsal import has_usual_figures
from tasks.reporting import figures, nothing
from tasks.reporting.figures import Drawing, picture, png, rehearse_picture
from tasks.runs.stage_main import main_of
from tasks.tracking.runs import FinishedRun, sections
from tests.algorithms.privacy.conftest import KEY
from tests.support.checkout import PROJECT, Checkout
from tests.support.comparisons import document, run_here, small
from tests.support.hostile_texts import HOSTILE
from tests.support.refusals import refused_as
from tests.support.synthetic_run import description, record, with_entries, write_run
from tests.support.workspace import Workspace

CLASSES = HOSTILE[:10]
ESCAPES = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]")


@pytest.fixture
def drawn(quick_work: None) -> Iterator[None]:
    """Figures are really drawn."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "png", png)
        patch.setattr(report, "picture", picture)
        patch.setattr(figures, "rehearse_picture", rehearse_picture)
        yield


class Tags(HTMLParser):
    """The tags and attributes of a page, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.markup: set[str] = set()
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.markup |= {tag, *(name for name, _ in attrs)}

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.usefixtures("drawn")
def test_a_run_whose_classes_look_like_markup_ends_with_its_card_and_page(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(workspace.root)
    workspace.declare(classes=CLASSES, unit="one <b>row</b> of $x_$", title=HOSTILE[2])
    workspace.set("privacy")
    workspace.train()
    evaluate.main()
    artifacts = workspace.root / "artifacts"
    report.report(artifacts=artifacts, prepared=workspace.root / "datasets/prepared", root=workspace.root)
    assert verify(load(artifacts / report.CARD), artifacts, unsigned=True).passed
    seen = Tags((artifacts / report.PAGE).read_text(encoding="utf-8"))
    assert seen.markup.isdisjoint({"script", "onerror"}) and "one <b>row</b> of $x_$" in seen.text


@pytest.mark.usefixtures("drawn", "every_rehearsal")
def test_a_figure_that_cannot_be_drawn_is_a_refusal_before_the_charge(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ValueError("no such glyph")

    workspace.declare(classes=CLASSES)
    monkeypatch.setattr(report, "class_figure", fail)
    with refused_as("card_rehearsal_failed") as refusal:
        workspace.train()
    assert str(refusal.value.fields["error"]) == "no such glyph"
    assert [row.kind for row in workspace.ledger.history()] in ([], ["population"])


@pytest.mark.parametrize(
    ("classes", "are_drawn"),
    [
        (["no", "up to 50,000 (%)"], False),
        ([f"kind {number}" for number in range(100)], False),
        (["no", "$x$"], True),
        (["no", "größer"], True),
        (["no", "yes\n"], True),
        ([f"kind {number}" for number in range(101)], True),
    ],
)
def test_figures_are_rehearsed_where_classes_are_unusual(classes: list[str], are_drawn: bool) -> None:
    info = replace(description(), classes=tuple(classes))
    assert has_usual_figures(info) is not are_drawn


def drawings() -> dict[str, Drawing]:
    names = list(HOSTILE)
    count = len(names)
    pairs = pd.DataFrame({"actual": names, "predicted": names})
    classes = pd.DataFrame({"class": names, "accuracy": 0.5, "records": 1})
    blocks = pd.DataFrame({"block": names, "spent_epsilon": 1.0, "cap_epsilon": 2.0, "retired": False})
    periods = pd.DataFrame({"period": names, "outcome": "kept", "epsilon": 1.0, "quality": 0.5})
    ours = pd.DataFrame({"dataset": "a", "model": names, "label": names, "epsilon": 1.0})
    lines = pd.concat([ours.assign(step=step, gap=0.1 + step) for step in range(4)])
    return {
        "confusion": lambda theme: figures.confusion_figure(pairs, names, theme=theme),
        "classes": lambda theme: figures.class_figure(classes, overall=0.5, theme=theme),
        "blocks": lambda theme: figures.blocks_figure(blocks, theme=theme),
        "retrainings": lambda theme: figures.retrainings_figure(periods, theme=theme),
        "by epsilon": partial(
            comparison.draw_by_epsilon,
            ours.assign(
                dataset=names[0], model=names[1], accuracy_mean=np.arange(count), accuracy_stderr=0.1
            ),
            "accuracy",
            words="Accuracy",
        ),
        "over steps": partial(
            comparison.draw_over_steps,
            lines.assign(dataset=names[0], model=names[1]),
            x="step",
            y="gap",
            words="gap",
        ),
    }


@pytest.mark.usefixtures("drawn")
@pytest.mark.parametrize("name", drawings())
def test_every_figure_draws_any_name_and_leaves_room_for_the_rest(name: str) -> None:
    with warnings.catch_warnings(), rc_context({"text.usetex": True}):  # as in somebody's matplotlibrc
        warnings.simplefilter("error")  # also where a long name leaves no room, or a font lacks a character
        assert picture(drawings()[name], "").wide.startswith(b"\x89PNG")


def test_a_method_that_begins_with_an_underscore_is_in_the_legend() -> None:
    figure = drawings()["by epsilon"](figures.LIGHT)
    assert {" _hidden", "- item"} <= {text.get_text() for text in figure.legends[0].get_texts()}


def test_the_card_at_a_terminal_is_readable_and_moves_no_cursor(tmp_path: Path) -> None:
    folders = write_run(tmp_path)
    run = record(folders)
    data = with_entries(run.data, title=HOSTILE[3], unit="a_b [red] \u202eevil")
    path = tmp_path / "privacy_card.json"
    path.write_bytes(build(replace(run, data=data), KEY).to_bytes())
    shown = CliRunner().invoke(app, ["card", "show", str(path)]).stdout
    assert f"# Privacy card: {visible(HOSTILE[3])}\n" in shown and "a_b [red] \\u202eevil" in shown
    assert not ESCAPES.search(shown)


def test_the_card_as_markdown_is_its_words(tmp_path: Path) -> None:
    run = record(write_run(tmp_path))
    for text in HOSTILE:
        card = build(replace(run, data=with_entries(run.data, title=text, unit=text)), KEY)
        tokens = MarkdownIt("commonmark", {"html": True}).enable("table").parse(markdown(card))
        kinds = {token.type for block in tokens for token in (block, *(block.children or ()))}
        assert kinds == {
            *(
                "heading_open",
                "inline",
                "text",
                "heading_close",
                "paragraph_open",
                "strong_open",
                "strong_close",
            ),
            *(
                "paragraph_close",
                "bullet_list_open",
                "list_item_open",
                "list_item_close",
                "bullet_list_close",
            ),
        } - (set() if "`" in markdown(card).replace("\\`", "") else {"code_inline"}), text


def test_tables_of_the_ledger_show_names_as_they_are(
    own_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger.open(f"sqlite:///{own_home}/ledger.sqlite")
    names = [name for name in HOSTILE if name.isprintable() and len(name) < 100]
    for name in names:
        ledger.declare(name, Budget(1.0, 1e-6), public=False)
    monkeypatch.chdir(tmp_path)
    for command in (["ledger", "show"], ["ledger", "history"]):
        done = CliRunner().invoke(app, command, env={"COLUMNS": "400"})
        assert done.exit_code == 0 and not ESCAPES.search(done.stdout)
        assert all(name in done.stdout for name in names)
    made = Tags(ledger_page(ledger))
    assert made.markup.isdisjoint({"script", "onerror"}) and all(name in made.text for name in names)


def test_predictions_are_data_to_a_spreadsheet_and_to_a_terminal(tmp_path: Path) -> None:
    names = (*HOSTILE, b"\xff.png".decode(errors="surrogateescape"))
    classes = ("-1", "=1+1")
    some = Predictions(
        names, tuple(classes[place % 2] for place in range(len(names))), np.full((len(names), 2), -0.5), False
    )
    terminal = io.StringIO()
    assert (
        [*write([some], classes, terminal)] == [len(names)] == [*write([some], classes, tmp_path / "p.csv")]
    )
    assert terminal.getvalue() == (tmp_path / "p.csv").read_text(encoding="utf-8")
    rows = list(csv.reader(io.StringIO(terminal.getvalue())))
    assert rows[0] == ["record", "predicted", "score of -1", "score of =1+1"]
    assert [from_csv(row[0]) for row in rows[1:]] == [*map(visible, HOSTILE), "\\udcff.png"]
    assert not [
        cell for row in rows for cell in row if re.match(r"[=+\-@\t\r]", cell) and cell not in ("-1", "-0.5")
    ]
    assert not ESCAPES.search(terminal.getvalue())
    assert [*write([some], classes, tmp_path / "p.parquet")] == [len(names)]


def test_a_table_of_scores_has_no_formula_and_comes_back(tmp_path: Path) -> None:
    frame = pd.DataFrame({"=name": list(HOSTILE), "score": -0.5, "none": None})
    write_csv(frame, tmp_path / "table.csv")
    assert (tmp_path / "table.csv").read_text().startswith("'=name,score,none\n")
    again = read_csv(tmp_path / "table.csv")
    assert list(again.iloc[:, 0]) == list(map(visible, HOSTILE)) and set(again["score"]) == {"-0.5"}


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> ComparisonWork:
    asked = document()
    asked["methods"] = {
        name: method | {"label": f"=1 | <i>{name}</i> [x](y)"} for name, method in asked["methods"].items()
    }
    return run_here(small(tmp_path_factory.mktemp("hostile") / "checkout"), asked)


def test_a_comparison_shows_its_methods_names_as_they_are(compared: ComparisonWork) -> None:
    comparison.report(compared, refused=["<img src=x onerror=alert(1)>"])
    folder = compared.workspace.folder
    page = MarkdownIt("commonmark", {"html": True}).enable("table").render((folder / "page.md").read_text())
    for text in (page, (folder / "report.html").read_text()):
        seen = Tags(text)
        assert seen.markup.isdisjoint({"i", "onerror", "a"}) and "=1 | <i>dp_sgd</i> [x](y)" in seen.text
    assert "\n| " in (folder / "page.md").read_text()
    assert not re.search(r"(^|,)=", (folder / "results.csv").read_text(), re.MULTILINE)


def test_the_page_of_a_release_shows_names_as_they_are(
    finished_once: Checkout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.model_card.metric_rows", lambda _: [(HOSTILE[5], HOSTILE[11])])
    release(finished_once.root / "artifacts", tmp_path / "released", key=None)
    page = (tmp_path / "released/README.md").read_text().split("---\n", 2)[2]
    seen = Tags(MarkdownIt("commonmark", {"html": True}).render(page))
    assert seen.markup.isdisjoint({"img", "a"}) and f"{HOSTILE[5]}: {HOSTILE[11]}" in seen.text


def test_all_csv_files_are_written_by_the_one_place_that_makes_cells_safe() -> None:
    files = [
        path
        for folder in ("flows", "tasks", "algorithms", "data")
        for path in (PROJECT / folder).rglob("*.py")
    ]
    assert [path.name for path in files if ".to_csv(" in path.read_text()] == ["csv_files.py"]


def test_the_report_for_wandb_shows_names_as_they_are(tmp_path: Path) -> None:
    folders = write_run(tmp_path)
    made = report.report(artifacts=folders.artifacts, prepared=folders.prepared, root=tmp_path)
    run, cells = record(folders), set()
    for text in HOSTILE:
        card = build(replace(run, data=with_entries(run.data, unit=text)), KEY)
        finished = FinishedRun(card, made.run.metrics, made.run.trace, made.run.info, made.curve)
        page = sections(finished, nothing())["card"][1]
        tokens = MarkdownIt("commonmark", {"html": True}).enable("table").parse(page)
        kinds = {token.type for block in tokens for token in (block, *(block.children or ()))}
        assert kinds == {"inline", "text"} | {
            f"{name}_{end}"
            for name in ("paragraph", "table", "thead", "tbody", "tr", "th", "td")
            for end in ("open", "close")
        }
        cells.add(sum(block.type == "td_open" for block in tokens))
        shown = [child.content for block in tokens for child in block.children or () if child.type == "text"]
        assert any(f"one record ({visible(text)})" in line for line in shown)
    assert len(cells) == 1


@pytest.mark.parametrize("text", [name for name in HOSTILE if not name.isprintable()])
def test_lines_of_stages_and_refusals_move_no_cursor(
    text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise RefusedError(f"there is no {text}")

    with pytest.raises(SystemExit):
        main_of(refuse)
    monkeypatch.setattr("logging.root.handlers", [])
    main_of(lambda: logging.getLogger("tasks").warning("about %s", text))
    steps = StageOutput(verbose=True)
    steps.line(f"a line with {text} [bold]")
    written = capsys.readouterr().err
    assert not ESCAPES.search(written)
    lines = " ".join(written.split())
    assert "refused: there is no" in lines and f"about {visible(text)}" in lines
    assert f"a line with {visible(text)} [bold]" in lines


def test_prefects_table_shows_names_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefect renders the cells of a table artifact as Markdown."""
    tables: list[object] = []
    summary = [("population", "a_b [x](https://e.org) <b>")]
    for name, value in {
        "load": lambda _: None,
        "markdown": lambda _: "",
        "run_summary": lambda _: summary,
        "reuse_note_of": lambda _: None,
        "get_run_logger": logging.getLogger,
        "create_markdown_artifact": lambda *_, **__: None,
        "create_table_artifact": lambda table, **_: tables.append(table),
    }.items():
        monkeypatch.setattr(deployed, name, value)
    assert deployed.publish(Path()) == summary
    assert tables == [[{"what": "population", "value": r"a\_b \[x\](https://e.org) &lt;b&gt;"}]]

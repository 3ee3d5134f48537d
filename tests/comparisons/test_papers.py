"""The list of the papers' tables and figures: complete, each defined or explained, definitions run at tiny sizes."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer

from algorithms.errors import RefusedError
from comparisons import deep_figures, papers
from comparisons.papers import (
    FOLDER,
    MAX_CELL,
    MAX_CLAIMS,
    Item,
    definition_file,
    items_of,
    items_page,
    load_papers,
    verdicts_page,
)
from data import dataset_info, prepared
from data.card import data_card
from data.description import DatasetInfo
from data.readers.records import RecordBatch, RecordChunk
from flows.cli import runs
from tasks.comparing.definition import Trial, digest_of, load, trials
from tasks.comparing.trial import ComparisonFolder, plan_trial, prepared_folder, run_trial
from tasks.comparing.work import ComparisonWork, lock_comparison, work_of
from tests.support.comparisons import PROJECT, small

pytestmark = pytest.mark.usefixtures("brief_inspections")

# Typed from the papers, as far as their texts are at hand.
PRINTED = {
    "000": "table-1 table-2 figure-1 figure-2 figure-3 section-4-3 appendix-b",
    "001": "table-1 table-2 table-3 table-4 table-5 table-6"
    " figure-1 figure-2 figure-3 figure-4 figure-5 figure-6 figure-7 figure-8",
    "002": "table-1 table-2 figure-1 figure-2 figure-3 figure-4",
    "003": "table-1 table-2 table-3 table-4 table-5 table-6 table-7 table-8 figure-1",
    "004": "figure-1 figure-2 figure-3 figure-4",
}
PAPERS = load_papers()
ITEMS = items_of(PAPERS)
DEFINITIONS = sorted({name for item in ITEMS.values() for name in item.definitions if name.endswith(".yaml")})
RECORDS = {"train": 48, "test": 16}
TINY = {
    "steps": 2, "epochs": 1, "rounds": 2, "iterations": 3, "expected_batch_size": 8, "batch_size": 8, "components": 3,
}  # fmt: skip


def test_every_table_and_figure_has_an_entry() -> None:
    assert {number: set(paper.items) for number, paper in PAPERS.items()} == {
        number: set(names.split()) for number, names in PRINTED.items()
    }


def test_definitions_exist_and_what_has_none_says_why() -> None:
    for name, item in ITEMS.items():
        assert item.definitions or item.not_run, name
        for definition in item.definitions:
            suffix = "" if definition.endswith(".yaml") else ".py"
            assert (FOLDER / f"{definition}{suffix}").is_file(), definition
        assert item.figure is None or item.figure in deep_figures.FIGURES


def test_the_pages_are_made_from_the_list_and_the_table_of_verdicts_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table has a row a claim, and in no cell more than a reader takes in."""
    monkeypatch.chdir(tmp_path)
    for path in (papers.VERDICTS_PAGE, papers.ITEMS_PAGE):
        (tmp_path / path).parent.mkdir(parents=True)
    papers.main(None, False, 1, pages=True)
    for path in (papers.VERDICTS_PAGE, papers.ITEMS_PAGE):
        assert (tmp_path / path).read_text() == (PROJECT / path).read_text()
    rows = [
        line.strip("|").split(" | ") for line in verdicts_page(PAPERS).splitlines() if line.startswith("| [")
    ]
    assert len(rows) == sum(len(paper.claims) for paper in PAPERS.values()) <= MAX_CLAIMS
    assert max(len(cell.strip()) for row in rows for cell in row) <= MAX_CELL


def test_a_shortened_run_a_changed_verdict_and_all_figures_are_seen() -> None:
    verdicts, all_figures = verdicts_page(PAPERS), items_page(PAPERS)
    for paper in PAPERS.values():
        for claim in paper.claims:
            (row,) = [
                line
                for line in verdicts.splitlines()
                if f"| {claim.claim} (" in line and f"| {claim.ours} |" in line
            ]
            assert f"**{claim.verdict}**" in row
            assert ("✂" in row) is (claim.shortened is not None)
            assert claim.was is None or f"(before: {claim.was})" in row
            assert claim.details is None or f": {claim.details}." in all_figures


def test_every_table_and_figure_is_on_the_page_beside_the_comparisons() -> None:
    lines = items_page(PAPERS).splitlines()
    for paper in PAPERS.values():
        for name, item in paper.items.items():
            assert any(line.startswith(f"- {name.replace('-', ' ')}: {item.shows} (") for line in lines), name


def test_a_verdict_needs_a_run() -> None:
    """What was not tested has no result, and what was tested has one."""
    for paper in PAPERS.values():
        for claim in paper.claims:
            assert (claim.verdict == "not tested") is (claim.ours == "-")


def shrunk(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings of an algorithm or features, for a few records and steps."""
    few = {
        key: shrunk(value)
        if isinstance(value, dict)
        else min(value, TINY[key])
        if key in TINY and value is not None
        else value
        for key, value in settings.items()
    }
    if settings.get("paper_budget"):
        few["iterations"] = settings["iterations"]
    match settings.get("name"):
        case "objective_perturbation":  # what few records cost with little regularisation
            return few | {"regularisation": None if settings["regularisation"] is None else 10.0}
        case "quantile_clipping":
            return few | {"count_noise_multiplier": 1000.0}
        case "dpis":  # noise on norms as part of so few records would be too little
            return few | {"norm_noise": None, "norm_noise_multiplier": 1000.0, "oversampling": 2.0}
        case "sgd_ma" | "sgd_adv":
            return few | {"expected_batch_size": 8}
        case "principal_components":
            return few | {"noise": 1000.0}
    return few


def tiny(trial: Trial) -> Trial:
    """A run of a few steps; by RDP where it is fixed in advance, which is planned in no time."""
    settings = shrunk(trial.settings)
    is_quick = trial.accountant == "pld" and settings["name"] not in (
        "objective_perturbation",
        "output_perturbation",
    )
    return replace(
        trial,
        settings=settings,
        features=shrunk(trial.features),
        accountant="rdp" if is_quick else trial.accountant,
    )


def write_records(folder: Path, info: DatasetInfo) -> None:
    """A few random records of this description as a prepared data set."""
    draw = np.random.default_rng(1)

    def of(count: int) -> RecordBatch:
        shape = (count, *info.input_shape)
        if info.tokens is None:
            features = draw.random(shape).astype(np.float32)
        else:
            features = draw.integers(1, info.tokens, shape).astype(np.int32)
        return RecordBatch(features, np.arange(count) % len(info.classes))

    chunks = [RecordChunk(part, of(count)) for part, count in RECORDS.items()]  # type: ignore[arg-type]
    sizes = replace(info, records=RECORDS["train"], test_records=RECORDS["test"])
    prepared.write(folder, chunks, sizes, salt=bytes(32), at_most=None)


def last_of_each_method(work: ComparisonWork) -> list[Trial]:
    """The last run of each method on each data set and model, at the largest epsilon."""
    return [tiny(one) for one in {(one.dataset, one.model, one.method): one for one in work.trials}.values()]


@pytest.mark.parametrize("definition", DEFINITIONS)
def test_a_definition_runs_at_tiny_sizes(definition: str, tmp_path: Path) -> None:
    """Each of its methods is planned on each data set, and two are run, new ones first."""
    root = small(tmp_path / "checkout")
    shutil.copytree(FOLDER / "published", root / "comparisons" / "published")
    work = work_of(FOLDER / definition, root)
    chosen = last_of_each_method(work)
    for trial in chosen:
        folder = prepared_folder(work.workspace.store, trial)
        if not folder.exists():
            write_records(folder, dataset_info(data_card(trial.dataset), trial.transform, None))
    with lock_comparison(work.workspace):
        refused = [trial for trial in chosen if not is_planned(work, trial)]
        assert not refused or (work.comparison.skip_refused and len(refused) < len(chosen) / 2)
        wanted = {kind_of(trial): trial for trial in chosen if trial not in refused}
        new = [trial for kind, trial in wanted.items() if kind not in RUN] or [next(iter(wanted.values()))]
        for trial in new[:RUNS_EACH]:
            run_trial(work.context, trial)
            assert 0.0 <= work.workspace.result(trial.digest)["results"]["accuracy"] <= 1.0
            RUN.add(kind_of(trial))


RUNS_EACH = 2
RUN: set[str] = set()
"""The kinds of runs that another definition has shown to run."""


def kind_of(trial: Trial) -> str:
    """What decides whether a run runs: model, algorithm and settings, but not how long its steps are."""
    settings = {
        key: value for key, value in trial.settings.items() if key not in ("update", "h2", "steps_grid")
    }
    return digest_of([trial.model, trial.transform, settings, trial.features, trial.record])


def is_planned(work: ComparisonWork, trial: Trial) -> bool:
    try:
        plan_trial(work.context, trial)
    except RefusedError:
        return False
    return True


def test_every_definition_can_be_read(tmp_path: Path) -> None:
    for definition in DEFINITIONS:
        comparison = load(FOLDER / definition)
        cards = {problem.dataset: data_card(problem.dataset) for problem in comparison.problems}
        assert trials(comparison.model_copy(update={"seeds": 1, "folds": None}), cards, file=definition)


@pytest.mark.parametrize(
    ("name", "definition"),
    sorted(
        {definition: (name, definition) for name, item in ITEMS.items() for definition in item.full}.values()
    ),
)
def test_the_papers_own_protocol_is_a_comparison(name: str, definition: str, tmp_path: Path) -> None:
    """It is a comparison of its own, whose settings can be read, and never smaller than the default."""
    item = ITEMS[name]
    file = definition_file(item, definition, tmp_path, full=True)
    full, default = load(file), load(FOLDER / definition)
    assert full.name == f"{default.name}-full" and full != default
    assert full.seeds >= default.seeds and len(full.epsilons) >= len(default.epsilons)
    cards = {problem.dataset: data_card(problem.dataset) for problem in full.problems}
    assert trials(full.model_copy(update={"seeds": 1, "folds": None}), cards, file=file.name)
    assert definition_file(item, definition, tmp_path, full=False) == FOLDER / definition


def test_an_item_is_run_and_its_figure_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []
    monkeypatch.setattr(runs, "compare", lambda files, workers: done.append((files, workers)))
    monkeypatch.setattr(deep_figures, "main", lambda *given: done.append(given))
    item = ITEMS["000-figure-3"]
    papers.run_item(item, tmp_path, full=True, workers=1)
    file = tmp_path / "artifacts" / "papers" / "adaclip-error-full.yaml"
    assert done[0] == ([file], 1)
    assert done[1] == (
        "adaclip-error",
        tmp_path / "artifacts/compare/adaclip-error-full",
        tmp_path / "artifacts/papers",
    )
    assert load(file).seeds == 5


def test_a_paper_s_own_protocol_may_leave_definitions_out_and_a_figure_is_drawn_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[str] = []
    drawn: list[str] = []
    monkeypatch.setattr(runs, "compare", lambda files, workers: compared.append(files[0].stem))
    monkeypatch.setattr(deep_figures, "main", lambda figure, *_: drawn.append(figure))
    item = Item(
        shows="errors",
        paper="-",
        ours="-",
        definitions=("adaclip.yaml", "adaclip-error.yaml"),
        figure="adaclip-error",
        full={"adaclip-error.yaml": {"seeds": 5}},
    )
    papers.run_item(item, tmp_path, full=False, workers=1)
    assert compared == ["adaclip", "adaclip-error"] and drawn == ["adaclip-error"]
    compared.clear()
    papers.run_item(item, tmp_path, full=True, workers=1)
    assert compared == ["adaclip-error-full"]


def test_the_list_is_printed_and_unknown_items_are_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(papers, "progress_of", lambda file, root: (0, 105))
    papers.main(None, False, 1)
    printed = capsys.readouterr().out
    assert all(name in printed for name in ITEMS)
    assert "adaclip.yaml (0/105)" in printed
    for item, why in (("000-table-9", "there is no item"), ("001-figure-5", "has no definition")):
        with pytest.raises(typer.BadParameter, match=why):
            papers.main(item, False, 1)


def test_an_entry_without_a_definition_or_a_reason_is_refused() -> None:
    with pytest.raises(ValueError, match="neither definitions nor not_run"):
        Item(shows="x", paper="-", ours="-")
    with pytest.raises(ValueError, match="not among the definitions"):
        Item(shows="x", paper="-", ours="-", definitions=("a.yaml",), full={"b.yaml": {}})


def test_the_number_of_runs_that_are_done_is_that_of_their_files(tmp_path: Path) -> None:
    place = ComparisonFolder(tmp_path, "adaclip-momentum")
    assert papers.progress_of(FOLDER / "adaclip-momentum.yaml", tmp_path) == (0, 12)
    one, *_ = work_of(FOLDER / "adaclip-momentum.yaml", small(tmp_path / "checkout")).trials
    place.trials.mkdir(parents=True)
    for digest in (one.digest, "0" * 24):  # the other is of a run that has left the file
        (place.trials / f"{digest}.json").write_text("{}")
    assert papers.progress_of(FOLDER / "adaclip-momentum.yaml", tmp_path) == (1, 12)

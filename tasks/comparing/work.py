"""Run a comparison: its cells, those without a result, and planning and running them in groups."""

import traceback
from dataclasses import dataclass
from pathlib import Path

from algorithms.privacy.barrier.barrier import Performance
from data.card import data_card
from tasks.comparing.comparison import Comparison, load
from tasks.comparing.data import make_ready, prepared_folder
from tasks.comparing.files import Place
from tasks.comparing.results import read_published
from tasks.comparing.trial import Context, open_ledger, plan_cell, run_cell
from tasks.comparing.trials import Group, Trial, cells, code_digest
from tasks.runs.stages import refusals


@dataclass(frozen=True)
class Work:
    """A comparison and its cells, in the order of its file."""

    comparison: Comparison
    context: Context
    cells: tuple[Trial, ...]

    @property
    def place(self) -> Place:
        """The folder of its files."""
        return self.context.place

    def unfinished(self, *, renew: bool) -> list[Trial]:
        """The cells without a result, each once. renew: also those whose result is from other code."""
        done = self.place.finished()
        if renew:
            done = {one for one in done if self.place.result(one)["code"] == self.context.code}
        return list({cell.digest: cell for cell in self.cells if cell.digest not in done}.values())


@dataclass(frozen=True)
class Problem:
    """A cell that did not run, and a sentence that says why."""

    cell: Trial
    sentence: str

    def in_words(self) -> str:
        """The sentence, preceded by the cell's names in the file."""
        epsilon = "" if self.cell.epsilon is None else f", epsilon {self.cell.epsilon:g}"
        setting = f", {self.cell.setting}" if self.cell.setting else ""
        return (
            f"{self.cell.method} on {self.cell.dataset}, {self.cell.model}{setting}{epsilon}: {self.sentence}"
        )


def work_of(file: Path, root: Path) -> Work:
    """Read and check a comparison's file; its data sets are not prepared yet.

    Raises ParamsRefusedError, RefusedError or DataRefusedError with one sentence that names the faulty key.
    """
    comparison = load(file)
    root = root.absolute()
    folder = root / "data" / "cards"
    cards = {problem.dataset: data_card(problem.dataset, folder) for problem in comparison.problems}
    if comparison.published is not None:
        read_published(root / comparison.published)
    wanted = tuple(cells(comparison, cards, file=file.name))
    runs = len({cell.digest for cell in wanted})
    performance = Performance(**comparison.performance.model_dump())
    return Work(comparison, Context(Place(root, comparison.name), code_digest(), runs, performance), wanted)


def prepare_data(work: Work) -> None:
    """Prepare each data set that does not exist yet; raises DataRefusedError."""
    for cell in {prepared_folder(work.place.store, cell): cell for cell in work.cells}.values():
        make_ready(work.place.store, cell, root=work.place.root)


def plan_group(context: Context, group: Group) -> list[Problem]:
    """Make the plans of a group, which are kept on disk; returns the cells that cannot run."""
    problems = []
    for cell in group:
        try:
            plan_cell(context, cell)
        except refusals() as refusal:
            problems.append(Problem(cell, " ".join(str(refusal).split())))
    return problems


def run_group(context: Context, group: Group) -> list[Problem]:
    """Run the cells of a group one after the other until a stop is requested; returns those that failed."""
    problems = []
    ledger = open_ledger(context.place, group[0])
    for cell in group:
        if context.place.stop.exists():
            break
        try:
            run_cell(context, cell, ledger)
        except Exception as error:  # a cell that fails must not stop the others
            path = context.place.failures / f"{cell.digest}.txt"
            path.write_text(traceback.format_exc(), encoding="utf-8")
            problems.append(Problem(cell, " ".join(str(error).split()) or type(error).__name__))
    return problems

"""Lists and runs every table and figure of the five papers: `python -m comparisons.papers`, or `make papers`.

    make papers                             # the list: definitions, how many of their runs are done, verdicts
    make papers ARGS="000-table-2"          # runs its definitions
    make papers ARGS="000-table-2 --full"   # with the paper's own protocol, as far as it is known
    make papers ARGS="--pages"              # docs/results/papers.md and comparisons/results/papers.md

The list is comparisons/published/papers.yaml. Two pages are made from it: claims with their verdicts, and beside the
comparisons all figures of long verdicts and every table and figure. A definition is a comparison, or a module of this
folder that draws a figure. Each run is a file once it is done, so the same command goes on where it was stopped; with
--full they are apart from the others, in artifacts/compare/NAME-full.
"""

import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Annotated, Literal, Self

import typer
from pydantic import Field, JsonValue, ValidationError, model_validator
from rich.table import Table

from data.card import data_card
from data.files import write_text
from tasks.comparing.definition import load, trials
from tasks.comparing.trial import ComparisonFolder
from tasks.config.overrides import with_values
from tasks.config.params import StrictModel, bad_keys, read_yaml
from tasks.runs.stage_main import refusals
from tasks.terminal import PlainConsole

FOLDER = Path(__file__).parent
LIST = FOLDER / "published" / "papers.yaml"
FULL = Path("artifacts/papers")
"""Where the comparisons with a paper's own protocol are written, and figures drawn."""
VERDICTS_PAGE = Path("docs/results/papers.md")
ITEMS_PAGE = Path("comparisons/results/papers.md")
"""The two pages, from the root of the checkout."""
MAX_CLAIMS = 40
MAX_CELL = 250
"""The characters that a cell of the table of verdicts may have, so that it can be read."""

Verdict = Literal["holds", "in part", "does not hold", "not tested"]


class Item(StrictModel):
    """A table or figure of a paper.

    shows: what is in it. paper, ours: the protocols. definitions: comparisons of this folder, and modules, without
    .yaml, whose `main` draws into a folder. figure: of `deep_figures`, drawn from the first comparison. full: by
    definition what --full changes, by dotted key; where nothing is given, the definitions are the paper's as they
    stand. not_run: why it was not run, or not as in the paper.
    """

    shows: str
    paper: str
    ours: str
    definitions: tuple[str, ...] = ()
    figure: str | None = None
    full: dict[str, dict[str, JsonValue]] = Field(default_factory=dict)
    not_run: str | None = None

    @model_validator(mode="after")
    def _is_defined_or_says_why_not(self) -> Self:
        if not self.definitions and self.not_run is None:
            raise ValueError("neither definitions nor not_run is given")
        if unknown := sorted(self.full.keys() - set(self.definitions)):
            raise ValueError(f"full changes {unknown[0]}, which is not among the definitions")
        return self

    def to_run(self, *, full: bool) -> tuple[str, ...]:
        """The definitions to run."""
        return tuple(self.full) if full and self.full else self.definitions


class Claim(StrictModel):
    """What a paper says, and what is left of it.

    items: the tables and figures it is read from. ours: the figures that decide the verdict; details: all of them,
    where there are more. shortened: what was run, where the verdict rests on less than their protocol. was: the
    verdict before, where it has changed.
    """

    claim: str = Field(max_length=MAX_CELL)
    items: tuple[str, ...] = Field(min_length=1)
    printed: str = Field(max_length=MAX_CELL)
    ours: str = Field(max_length=MAX_CELL)
    details: str | None = None
    verdict: Verdict
    shortened: str | None = Field(None, max_length=MAX_CELL)
    was: str | None = None


class Paper(StrictModel):
    """A paper. page: of docs/results, with its results."""

    title: str
    page: str
    items: dict[str, Item]
    claims: tuple[Claim, ...]

    @model_validator(mode="after")
    def _claims_are_read_from_its_items(self) -> Self:
        named = {item for claim in self.claims for item in claim.items}
        if unknown := sorted(named - self.items.keys()):
            raise ValueError(f"a claim is read from {unknown[0]}, which is not among the items")
        return self


def load_papers(path: Path = LIST) -> dict[str, Paper]:
    """The papers by their number; raises ParamsRefusedError for a file that is not complete."""
    document = read_yaml(path, holds="papers by their number", missing="it is part of the checkout")
    try:
        return {number: Paper.model_validate_json(json.dumps(paper)) for number, paper in document.items()}
    except ValidationError as error:
        raise bad_keys(path.name, error) from None


def items_of(papers: dict[str, Paper]) -> dict[str, Item]:
    """All items by their id, such as 000-table-1."""
    return {
        f"{number}-{name}": item for number, paper in papers.items() for name, item in paper.items.items()
    }


def definition_file(item: Item, definition: str, root: Path, *, full: bool) -> Path:
    """The file of a comparison: of this folder, or with the paper's protocol written below `root`."""
    file = FOLDER / definition
    changes = item.full.get(definition)
    if not full or not changes:
        return file
    name = f"{file.stem}-full"
    document = with_values(
        read_yaml(file, holds="a comparison", missing="it is part of the checkout"), changes
    )
    target = root / FULL / f"{name}.yaml"
    target.parent.mkdir(parents=True, exist_ok=True)
    write_text(target, json.dumps(document | {"name": name}, indent=1))
    return target


def progress_of(file: Path, root: Path) -> tuple[int, int]:
    """How many runs of a comparison are done, and how many there are."""
    comparison = load(file)
    cards = {problem.dataset: data_card(problem.dataset) for problem in comparison.problems}
    wanted = {trial.digest for trial in trials(comparison, cards, file=file.name)}
    return len(wanted & ComparisonFolder(root, comparison.name).finished_digests()), len(wanted)


def run_item(item: Item, root: Path, *, full: bool, workers: int) -> None:
    """Run the definitions of an item that are not done, and draw its figure; progress is that of a comparison."""
    from flows.cli.runs import compare  # Prefect, which takes seconds to import

    drawn = root / FULL
    for definition in item.to_run(full=full):
        if not definition.endswith(".yaml"):
            import_module(f"comparisons.{definition}").main(drawn)
            continue
        file = definition_file(item, definition, root, full=full)
        compare([file], workers=workers)
        if item.figure is not None and definition == item.definitions[0]:
            import_module("comparisons.deep_figures").main(
                item.figure, ComparisonFolder(root, file.stem).folder, drawn
            )


def table_of(papers: dict[str, Paper], root: Path) -> Table:
    """The list, as it is printed."""
    table = Table("item", "shows", "definitions (runs done)", "not run, because", title="Tables and figures")
    items, lines = items_of(papers), {"": "-"}
    for definition in dict.fromkeys(name for item in items.values() for name in item.definitions):
        is_comparison = definition.endswith(".yaml")
        done = " ({}/{})".format(*progress_of(FOLDER / definition, root)) if is_comparison else ""
        lines[definition] = f"{definition}{done}"
    for name, item in items.items():
        defined = "\n".join(lines[definition] for definition in item.definitions or ("",))
        table.add_row(name, item.shows, defined, item.not_run or "")
    return table


def verdicts_page(papers: dict[str, Paper]) -> str:
    """docs/results/papers.md: each claim with its verdict."""
    return "\n".join([*_VERDICTS_INTRODUCTION, *_claim_rows(papers)]) + "\n"


def items_page(papers: dict[str, Paper]) -> str:
    """comparisons/results/papers.md: by paper all figures of its long verdicts, then its tables and figures."""
    return "\n".join([*_ITEMS_INTRODUCTION, *_item_lines(papers)]) + "\n"


_VERDICTS_INTRODUCTION = [
    "# The five papers",
    "",
    "What remains of the papers' claims under sound accounting at equal epsilon, with methods tuned alike. Each row",
    "has the figures that decide its verdict; the linked pages have the results, and `comparisons/results/papers.md`",
    "all figures, with what was run for every table and figure of the papers.",
    "",
    "`make papers` lists every table and figure, and",
    '`make papers ARGS="000-table-2"` runs one, with `--full` by the paper\'s own protocol. This page is made from',
    "`comparisons/published/papers.yaml` by `python -m comparisons.papers --pages`.",
    "",
    "✂ marks a verdict that rests on a shortened run, and says what was run. Other verdicts rest on the paper's own",
    "protocol, as far as that is known, or on a proof. A verdict that has changed shows the one before.",
    "",
    "| paper | claim | as printed | ours | verdict |",
    "| --- | --- | --- | --- | --- |",
]
_ITEMS_INTRODUCTION = [
    "# The five papers: every table and figure",
    "",
    "[The page of verdicts](../../docs/results/papers.md) has what remains of each claim. Here are, by paper, all",
    "figures of its longer rows, and for every table and figure the definitions that run it, the paper's protocol and",
    "ours. Made from `comparisons/published/papers.yaml` by `python -m comparisons.papers --pages`.",
]


def _read_from(claim: Claim) -> str:
    return f"{claim.claim} ({', '.join(item.replace('-', ' ') for item in claim.items)})"


def _claim_rows(papers: dict[str, Paper]) -> Iterator[str]:
    for number, paper in papers.items():
        for claim in paper.claims:
            verdict = f"**{claim.verdict}**"
            verdict += f" ✂ {claim.shortened}" if claim.shortened else ""
            verdict += f" (before: {claim.was})" if claim.was else ""
            cells = (f"[{number}]({paper.page})", _read_from(claim), claim.printed, claim.ours, verdict)
            yield f"| {' | '.join(cells)} |"


def _item_lines(papers: dict[str, Paper]) -> Iterator[str]:
    for number, paper in papers.items():
        yield from ("", f"## {number}, {paper.title}", "")
        detailed = [f"- {_read_from(claim)}: {claim.details}." for claim in paper.claims if claim.details]
        if detailed:
            yield from ("All figures:", "", *detailed, "", "Tables and figures:", "")
        first: dict[str, str] = {}
        for name, item in paper.items.items():
            words = name.replace("-", " ")
            defined = ", ".join(f"`{definition}`" for definition in item.definitions) or "no definition"
            protocol = "" if item.paper == "-" else f" Paper: {item.paper}. Ours: {item.ours}."
            protocol += f" Not run as printed, because: {item.not_run}." if item.not_run else ""
            others = first.setdefault(f"({defined}).{protocol}", words)
            rest = f"({defined}).{protocol}" if others == words else f"(all else as {others})."
            yield f"- {words}: {item.shows} {rest}"


def main(
    item: Annotated[str | None, typer.Argument(help="Such as 000-table-2; without one, the list.")] = None,
    full: Annotated[bool, typer.Option("--full", help="Run the paper's own protocol.")] = False,
    workers: Annotated[int, typer.Option(min=1, help="How many runs at once.")] = 2,
    pages: Annotated[bool, typer.Option("--pages", help="Write the pages of verdicts and of items.")] = False,
) -> None:
    """List or run the tables and figures of the five papers."""
    papers, root = load_papers(), Path.cwd()
    if pages:
        write_text(root / VERDICTS_PAGE, verdicts_page(papers))
        write_text(root / ITEMS_PAGE, items_page(papers))
        return
    if item is None:
        PlainConsole().print(table_of(papers, root))
        return
    known = items_of(papers)
    if item not in known:
        raise typer.BadParameter(f"there is no item {item!r}; choose one of {', '.join(known)}")
    if not known[item].definitions:
        raise typer.BadParameter(f"{item} has no definition: {known[item].not_run}")
    try:
        run_item(known[item], root, full=full, workers=workers)
    except refusals() as refusal:
        typer.echo(str(refusal), err=True)
        raise typer.Exit(1) from None


if __name__ == "__main__":
    typer.run(main)

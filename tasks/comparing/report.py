"""What a comparison leaves: tables, figures, the page, and cards that say how many runs there were."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from algorithms.privacy.ledger import Ledger
from data.files import write_whole
from tasks.comparing import figures
from tasks.comparing.cell_card import sweep
from tasks.comparing.cells import Cell
from tasks.comparing.files import Place, write_json
from tasks.comparing.page import WORDS, Content, html, markdown, published_table, result_tables
from tasks.comparing.published import beside, read_published
from tasks.comparing.results import results, summary, write_tables
from tasks.comparing.work import Work
from tasks.figures import DARK, LIGHT, Theme, png
from tasks.page import Picture

PAGE, MARKDOWN = "report.html", "page.md"
FILES = ("results.parquet", "results.csv", "summary.csv", PAGE, MARKDOWN)
"""What a finished comparison consists of, beside its figures."""


@dataclass(frozen=True)
class Report:
    """The finished tables, and the figures by name."""

    table: pd.DataFrame
    totals: pd.DataFrame
    pictures: dict[str, Picture]
    runs: int


def report(work: Work, *, refused: Sequence[str]) -> Report:
    """Writes results.parquet, results.csv, summary.csv, the figures, report.html and page.md of all finished cells.

    refused: why cells could not run, in words.
    """
    place = work.place
    table = results(place, work.cells)
    totals = summary(table)
    write_tables(place, table, totals)
    runs = count_runs(place)
    _stamp(place, table, runs)
    pictures = _pictures(work, table, totals) if len(table) else {}
    for name, picture in pictures.items():
        _write(place.folder / f"{name}.png", picture.light)
    content = _content(work, table, totals, pictures, refused=refused, runs=runs)
    _write(place.folder / PAGE, html(content).encode())
    _write(place.folder / MARKDOWN, markdown(content).encode())
    return Report(table, totals, pictures, runs)


def count_runs(place: Place) -> int:
    """How many runs the comparison's ledger has, those of cells that the file no longer has included."""
    ledgers = [Ledger.open(url) for url in place.ledger_urls()]
    return sum(row.kind == "reserve" for ledger in ledgers for row in ledger.history())


def _stamp(place: Place, table: pd.DataFrame, runs: int) -> None:
    """Brings the number of runs on the cells' cards up to date."""
    for digest in table["digest"].unique():
        result = place.result(digest)
        if result["card"]["runs"] != runs:
            result["card"] |= {"runs": runs, "sweep": sweep(place.name, runs)}
            write_json(place.cells / f"{digest}.json", result)


def _content(
    work: Work,
    table: pd.DataFrame,
    totals: pd.DataFrame,
    pictures: dict[str, Picture],
    *,
    refused: Sequence[str],
    runs: int,
) -> Content:
    published = work.comparison.published
    found = None if published is None else beside(read_published(work.place.root / published), totals)
    return Content(
        title=work.comparison.title,
        name=work.comparison.name,
        sweep=sweep(work.comparison.name, runs).replace("This is one of", "There were"),
        facts=_facts(work, table),
        tables=result_tables(totals),
        pictures=pictures,
        published=None if found is None else published_table(found),
        refused=refused,
    )


def _facts(work: Work, table: pd.DataFrame) -> list[tuple[str, str]]:
    comparison, versions = work.comparison, table["code"].nunique()
    folds = comparison.folds
    repeats = (
        f"{folds.repeats} x {folds.k}-fold cross-validation over training and test records, seed {folds.seed}"
        if folds
        else "the data's own split"
    )
    deltas = sorted(table["delta"].dropna().unique())
    facts = [
        ("problems", "; ".join(f"{problem.model} on {problem.dataset}" for problem in comparison.problems)),
        ("methods", ", ".join(dict.fromkeys(table["label"]))),
        ("delta", ", ".join(f"{delta:g}" for delta in deltas)),
        ("split", repeats),
        ("seeds of noise", str(comparison.seeds)),
        ("finished cells", f"{len(table):,} of {len(work.cells):,}"),
    ]
    if versions > 1:
        facts.append(("versions of the code", f"{versions}: --renew runs the older cells again"))
    return facts


def _pictures(work: Work, table: pd.DataFrame, totals: pd.DataFrame) -> dict[str, Picture]:
    pictures = {}
    for metric in ("accuracy", "objective"):
        if totals[f"{metric}_mean"].notna().any() and totals["epsilon"].notna().any():
            words = f"{WORDS[metric]} against epsilon; bars are one standard error, methods without noise are dashed."
            pictures[metric] = _picture(_against_epsilon(totals, metric), words)
    curves = _gathered(work.place, table, work.cells, "curve")
    if len(curves):
        gaps = figures.gaps(curves)
        words = (
            "How far the objective is above the least known on the same records, by step; mean over cells. A method"
            " that asks once is dashed."
        )
        pictures["convergence"] = _picture(lambda theme: figures.convergence(gaps, theme=theme), words)
    traces = _noise(_gathered(work.place, table, work.cells, "trace"))
    if len(traces):
        words = (
            "Standard deviation of the noise on each release, before it is divided, in the first run of each."
        )
        pictures["noise"] = _picture(lambda theme: figures.noise(traces, theme=theme), words)
    return pictures


def _against_epsilon(totals: pd.DataFrame, metric: str) -> Callable[[Theme], Figure]:
    return lambda theme: figures.by_epsilon(totals, metric, words=WORDS[metric].lower(), theme=theme)


def _gathered(place: Place, table: pd.DataFrame, cells: Sequence[Cell], kind: str) -> pd.DataFrame:
    """The curves or traces of the finished cells in one table, with the columns that name a cell."""
    names = ["dataset", "model", "label", "epsilon", "repeat", "fold"]
    frames = []
    for row in table.to_dict("records"):
        path = place.cells / f"{row['digest']}.{kind}.parquet"
        if path.exists():
            frames.append(
                pd.read_parquet(path)
                .rename(columns={"epsilon": "spent"})
                .assign(**{n: row[n] for n in names})
            )
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def _noise(traces: pd.DataFrame) -> pd.DataFrame:
    """The noised releases; where a method makes several kinds of release, its label names the kind."""
    if not len(traces):
        return traces
    traces = traces[traces["noise_std"] > 0]
    kinds = traces.groupby("label")["kind"].transform("nunique")
    named = traces["label"] + ", " + traces["kind"]
    return traces.assign(label=traces["label"].where(kinds == 1, named), release=traces["release"] + 1)


def _picture(draw: Callable[[Theme], Figure], words: str) -> Picture:
    return Picture(png(draw(LIGHT)), png(draw(DARK)), words)


def _write(path: Path, content: bytes) -> None:
    write_whole(path, lambda fresh: fresh.write_bytes(content))

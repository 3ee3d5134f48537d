"""The progress of a comparison, read from its folder, so that it does not matter which process runs the cells."""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tasks.comparing.files import Place
from tasks.comparing.trials import Group, Trial

_SECONDS, _SECONDS_BETWEEN_LINES, _SECONDS_OF_ESTIMATE = 0.5, 10.0, 900.0
_log = logging.getLogger(__name__)
Tell = Callable[[int, Trial | None], None]
"""Receives the number of finished cells and the one that finished last."""


@contextmanager
def progress(place: Place, groups: Sequence[Group], *, console: Console | None = None) -> Iterator[None]:
    """Within the block, show how many of the groups' cells are done, and which one finished last."""
    wanted = {cell.digest: cell for group in groups for cell in group}
    console = console or Console(stderr=True)
    if not wanted:
        yield
    elif console.is_terminal:
        with _bar(len(wanted), console) as tell, _watched(place, wanted, tell, every=_SECONDS):
            yield
    else:

        def tell(done: int, latest: Trial | None) -> None:
            last = f", last {_words(latest)}" if latest else ""
            _log.info("%d of %d cells done%s", done, len(wanted), last)

        with _watched(place, wanted, tell, every=_SECONDS_BETWEEN_LINES):
            yield


@contextmanager
def _watched(place: Place, wanted: dict[str, Trial], tell: Tell, *, every: float) -> Iterator[None]:
    ended, before = threading.Event(), place.finished() & wanted.keys()
    times = {digest: _time(place, digest) for digest in before}

    def look() -> None:
        fresh = [one for one in place.finished() & wanted.keys() if _time(place, one) != times.get(one)]
        latest = max(fresh, key=lambda one: _time(place, one), default=None)
        tell(len(fresh), wanted[latest] if latest else None)

    def watch() -> None:
        while not ended.wait(every):
            look()

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
        look()


def _time(place: Place, digest: str) -> float:
    return (place.cells / f"{digest}.json").stat().st_mtime


@contextmanager
def _bar(count: int, console: Console) -> Iterator[Tell]:
    columns = (
        TextColumn("comparing"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[current]}"),
    )
    with Progress(*columns, console=console, speed_estimate_period=_SECONDS_OF_ESTIMATE) as bar:
        task = bar.add_task("comparing", total=count, current="")

        def tell(done: int, latest: Trial | None) -> None:
            bar.update(task, completed=done, current=_words(latest))

        yield tell


def _words(cell: Trial | None) -> str:
    if cell is None:
        return ""
    epsilon = "" if cell.epsilon is None else f", epsilon {cell.epsilon:g}"
    return f"{cell.label} on {cell.dataset}{epsilon}"

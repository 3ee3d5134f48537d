"""Run a comparison: its trials, those without a result, planning and running them in groups, and their progress."""

import logging
import threading
import traceback
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from algorithms.plain_text import for_terminal
from algorithms.privacy.barrier.barrier import ComputeConfig
from data.card import data_card
from tasks.comparing.definition import (
    Comparison,
    Trial,
    TrialGroup,
    code_digest,
    load,
    read_published,
    trials,
)
from tasks.comparing.trial import (
    ComparisonFolder,
    TrialContext,
    plan_trial,
    prepare_dataset,
    prepared_folder,
    run_trial,
)
from tasks.config.own_code import named_code
from tasks.config.params import ParamsRefusedError
from tasks.refusals import PIPELINE
from tasks.runs.stage_main import refusals
from tasks.terminal import PlainConsole

_SECONDS, _SECONDS_BETWEEN_LINES, _SECONDS_OF_ESTIMATE = 0.5, 10.0, 900.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ComparisonWork:
    """A comparison and its trials, in the order of its file."""

    comparison: Comparison
    context: TrialContext
    trials: tuple[Trial, ...]

    @property
    def workspace(self) -> ComparisonFolder:
        """The folder of its files."""
        return self.context.workspace

    def unfinished_trials(self, *, renew: bool) -> list[Trial]:
        """The trials without a result, each once. renew: also those whose result is from other code."""
        done = self.workspace.finished_digests()
        if renew:
            done = {digest for digest in done if self.workspace.result(digest)["code"] == self.context.code}
        return list({trial.digest: trial for trial in self.trials if trial.digest not in done}.values())


@dataclass(frozen=True)
class SkippedTrial:
    """A trial that did not run, and a sentence that says why."""

    trial: Trial
    sentence: str

    def in_words(self) -> str:
        """The sentence, preceded by the trial's names in the file."""
        trial, setting = self.trial, f", {self.trial.setting}" if self.trial.setting else ""
        return f"{trial.method} on {trial.dataset}, {trial.model}{setting}{_at(trial)}: {self.sentence}"


@contextmanager
def lock_comparison(workspace: ComparisonFolder) -> Iterator[None]:
    """Lock the comparison within the block; raises ParamsRefusedError if another process has locked it."""
    for folder in (workspace.trials, workspace.plans, workspace.failures):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        lock = FileLock(workspace.folder / "lock").acquire(blocking=False)
    except Timeout:
        raise ParamsRefusedError(
            "another process works on the comparison {comparison!r}; wait for its end.",
            code="busy",
            comparison=workspace.name,
        ) from None
    with lock:
        workspace.stop.unlink(missing_ok=True)
        # Files are written under a name with a dot, and renamed.
        for half in (path for folder in (workspace.trials, workspace.plans) for path in folder.glob(".*")):
            half.unlink()  # left by a process that was killed while writing
        yield


def work_of(file: Path, root: Path, *, allow_code: Collection[str] = ()) -> ComparisonWork:
    """Read and check a comparison's file; its data sets are not prepared yet.

    allow_code: code of the user's own that the file may name, besides what params.yaml and data cards name. Raises
    RefusedError or DataRefusedError with one sentence that names the faulty key.
    """
    comparison = load(file, allow_code={*allow_code, *named_code(root)})
    root = root.absolute()
    folder = root / "data" / "cards"
    cards = {problem.dataset: data_card(problem.dataset, folder) for problem in comparison.problems}
    if comparison.published is not None:
        read_published(root / comparison.published)
    wanted = tuple(trials(comparison, cards, file=file.name))
    compute = ComputeConfig(**comparison.performance.model_dump())
    return ComparisonWork(
        comparison, TrialContext(ComparisonFolder(root, comparison.name), code_digest(), compute), wanted
    )


def prepare_data(work: ComparisonWork) -> None:
    """Prepare each data set that does not exist yet; raises DataRefusedError."""
    for trial in {prepared_folder(work.workspace.store, trial): trial for trial in work.trials}.values():
        prepare_dataset(work.workspace.store, trial, root=work.workspace.root)


def plan_group(context: TrialContext, group: TrialGroup) -> list[SkippedTrial]:
    """Make the plans of a group, which are kept on disk; returns the trials that cannot run."""
    problems = []
    for trial in group:
        try:
            with PIPELINE.wording_errors():
                plan_trial(context, trial)
        except refusals() as refusal:
            problems.append(SkippedTrial(trial, " ".join(str(refusal).split())))
    return problems


def run_group(context: TrialContext, group: TrialGroup) -> list[SkippedTrial]:
    """Run the trials of a group one after the other until a stop is requested; returns those that failed."""
    problems = []
    for trial in group:
        if context.workspace.stop.exists():
            break
        try:
            run_trial(context, trial)
        except Exception as error:  # a trial that fails must not stop the others
            path = context.workspace.failures / f"{trial.digest}.txt"
            path.write_text(traceback.format_exc(), encoding="utf-8")
            problems.append(SkippedTrial(trial, " ".join(str(error).split()) or type(error).__name__))
    return problems


@contextmanager
def progress(workspace: ComparisonFolder, groups: Sequence[TrialGroup]) -> Iterator[None]:
    """Within the block, show how many of the groups' trials are done, and which one finished last.

    It is read from the folder of results, so that it does not matter which process runs the trials: a bar on a
    terminal, otherwise a line every few seconds and one at the end.
    """
    wanted = {trial.digest: trial for group in groups for trial in group}
    if not wanted:
        yield
        return
    # Results from before are compared by time, as `--renew` writes them anew.
    console, before, ended = PlainConsole(stderr=True), workspace.finish_times(), threading.Event()
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
    )
    bar = Progress(
        *columns,
        console=console,
        speed_estimate_period=_SECONDS_OF_ESTIMATE,
        disable=not console.is_terminal,
    )
    shown = bar.add_task("", total=len(wanted))

    def show() -> None:
        fresh = {digest: at for digest, at in workspace.finish_times().items() if before.get(digest) != at}
        fresh = {digest: at for digest, at in fresh.items() if digest in wanted}
        trial = wanted[max(fresh, key=fresh.__getitem__)] if fresh else None
        last = "" if trial is None else f", last {trial.label} on {trial.dataset}{_at(trial)}"
        bar.update(shown, completed=len(fresh), description=for_terminal(last.removeprefix(", ")))
        if not console.is_terminal:
            _log.info("%d of %d trials done%s", len(fresh), len(wanted), last)

    def watch() -> None:
        while not ended.wait(_SECONDS if console.is_terminal else _SECONDS_BETWEEN_LINES):
            show()

    watcher = threading.Thread(target=watch, daemon=True)
    with bar:
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()
            show()


def _at(trial: Trial) -> str:
    return "" if trial.epsilon is None else f", epsilon {trial.epsilon:g}"

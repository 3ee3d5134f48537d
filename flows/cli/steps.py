"""A run step by step on the screen: one line a step, a bar for the training where there is a terminal.

Without a Prefect API the stages run here, one after the other, as the flow has them: Prefect would start a server for
the one run. DVC decides either way what has to run.
"""

import os
import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

if TYPE_CHECKING:
    from rich.progress import TaskID

    from tasks.config.overrides import Request
    from tasks.runs.summary import RunSummary

WORDS = {
    "prepare": "preparing the data",
    "calibrate": "calibrating the noise",
    "train": "training",
    "evaluate": "evaluating on the held-out records",
    "report": "writing card and report",
}
_STEP = re.compile(
    r"(?:.* - )?(?P<what>step|encoded) (?P<step>\d+) of (?P<steps>\d+)(?: records)?, (?P<rest>.*)"
)
_NOISE = re.compile(
    r"(Running stage |> python -m |Stage '|(Updating|Generating) lock file|To (track|enable) |\s*(git add|dvc config) "
    r"|Use `dvc |Verifying data sources|Data and pipelines are up|(ERROR: )?failed to (reproduce|run) )"
)
"""What DVC says beside a stage."""


@dataclass
class Steps:
    """What the stages of a run write, as lines for a person.

    verbose: whether everything is shown as it comes.
    """

    verbose: bool = False
    console: Console = field(default_factory=lambda: Console(stderr=True, highlight=False, soft_wrap=True))
    _bar: Progress | None = None
    _task: "TaskID | None" = None

    def begin(self, stage: str) -> None:
        """A stage begins."""
        self._close()
        self.console.print(f"{WORDS[stage]} ...", markup=False)

    def line(self, text: str) -> None:
        """A line that a stage or DVC wrote."""
        found = _STEP.fullmatch(text)
        if self.verbose or (found is None and not _NOISE.match(text) and not text.startswith("refused: ")):
            self._close()
            self.console.print(f"  {text}", markup=False)
        elif found and self.console.is_terminal:
            words = {"step": "steps", "encoded": "encoded records"}[found["what"]]
            self._advance(words, int(found["step"]), int(found["steps"]), found["rest"])
        elif found:
            self.console.print(f"  {text}", markup=False)

    def end(self) -> None:
        """No stage is at work any more."""
        self._close()

    def _advance(self, words: str, step: int, steps: int, rest: str) -> None:
        if self._bar is None:
            columns = (
                TextColumn(f"  {words}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.description}"),
            )
            self._bar = Progress(*columns, console=self.console, transient=True)
            self._bar.start()
            self._task = self._bar.add_task("", total=steps)
        if self._task is not None:
            self._bar.update(self._task, completed=step, description=rest)

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
        self._bar = self._task = None


def has_prefect_api() -> bool:
    """Whether this user has a Prefect server: PREFECT_API_URL, in the environment or in a profile of Prefect's."""
    if os.environ.get("PREFECT_API_URL"):
        return True
    folder = Path(os.environ.get("PREFECT_HOME") or Path.home() / ".prefect")
    try:
        kept = tomllib.loads((folder / "profiles.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    chosen = kept.get("profiles", {}).get(os.environ.get("PREFECT_PROFILE") or kept.get("active"), {})
    return bool(chosen.get("PREFECT_API_URL"))


def quieten_prefect() -> None:
    """Prefect's own lines go to its server alone; for before it is imported."""
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
    os.environ.setdefault("PREFECT_SERVER_LOGGING_LEVEL", "CRITICAL")


def stage_here(steps: Steps) -> Callable[[str, Path], None]:
    """What runs a stage in the checkout at a path, without Prefect.

    It raises StageRefusedError or StageFailedError.
    """
    from tasks.runs.stages import reproduce

    def stage(name: str, root: Path) -> None:
        steps.begin(name)
        reproduce(name, root=root, say=steps.line)

    return stage


def run_here(request: "Request", root: Path, steps: Steps) -> "RunSummary":
    """The pipeline of `flows.pipeline` without Prefect; raises StageRefusedError and StageFailedError.

    What a stage refuses leaves params.yaml as it was.
    """
    from tasks.config.overrides import revise
    from tasks.runs.stages import STAGES, StageRefusedError, checkout_lock
    from tasks.runs.summary import run_summary

    stage = stage_here(steps)
    with checkout_lock(root, say=steps.line):
        revision = revise(root, request)
        revision.write()
        try:
            for name in STAGES:
                stage(name, root)
        except StageRefusedError:
            revision.undo()
            raise
        finally:
            steps.end()
        return run_summary(root)

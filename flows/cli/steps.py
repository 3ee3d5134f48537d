"""Show a run on the screen: one line per stage, and a progress bar for training if there is a terminal.

Without a Prefect API the stages run here, in the flow's order, since Prefect would start a server for this one run.
Either way, DVC decides what has to run.
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
"""Lines of DVC's own, which are not shown."""


@dataclass
class Steps:
    """Prints what the stages of a run write, in a readable form.

    verbose: show everything unchanged.
    """

    verbose: bool = False
    console: Console = field(default_factory=lambda: Console(stderr=True, highlight=False, soft_wrap=True))
    _bar: Progress | None = None
    _task: "TaskID | None" = None

    def begin(self, stage: str) -> None:
        """A stage begins."""
        self.end()
        self.console.print(f"{WORDS[stage]} ...", markup=False)

    def line(self, text: str) -> None:
        """Show a line that a stage or DVC wrote."""
        found = _STEP.fullmatch(text)
        if self.verbose or (found is None and not _NOISE.match(text) and not text.startswith("refused: ")):
            self.end()
            self.console.print(f"  {text}", markup=False)
        elif found and self.console.is_terminal:
            words = {"step": "steps", "encoded": "encoded records"}[found["what"]]
            self._advance(words, int(found["step"]), int(found["steps"]), found["rest"])
        elif found:
            self.console.print(f"  {text}", markup=False)

    def end(self) -> None:
        """Remove the bar: something else is shown, or the last stage has ended."""
        if self._bar is not None:
            self._bar.stop()
        self._bar = self._task = None

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


def has_prefect_api() -> bool:
    """Whether a Prefect server is configured: PREFECT_API_URL, in the environment or in Prefect's profile."""
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
    """Send Prefect's own log lines only to its server; call this before Prefect is imported."""
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
    os.environ.setdefault("PREFECT_SERVER_LOGGING_LEVEL", "CRITICAL")


def stage_here(steps: Steps) -> Callable[[str, Path], None]:
    """A function that runs a stage in the checkout at a path, without Prefect.

    The function raises StageRefusedError or StageFailedError.
    """
    from tasks.runs.stages import reproduce

    def stage(name: str, root: Path) -> None:
        steps.begin(name)
        reproduce(name, root=root, say=steps.line)

    return stage

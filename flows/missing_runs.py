"""Log a finished run at W&B that is missing there, as after an outage: what each way of running does at its end."""

from collections.abc import Callable
from pathlib import Path

from tasks.tracking import has_run_to_log


def log_missing_run(root: Path, say: Callable[[str], object]) -> None:
    """Log the run in the checkout at `root` if W&B lacks it, and say how that ended."""
    if has_run_to_log(root):
        from tasks.report import track  # imports much, and is seldom needed

        say(track(root))

"""The process that W&B's client starts for a program, and looks for afterwards."""

import os
import sys


def end_service() -> None:
    """End it if this process has one; others that this process starts look for none."""
    if "wandb" in sys.modules:
        sys.modules["wandb"].teardown()
    os.environ.pop("WANDB_SERVICE", None)

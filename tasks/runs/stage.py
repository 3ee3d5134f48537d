"""A stage as a process of its own, in a checkout: what it refuses is one sentence on stderr and exit status 2."""

import logging
import sys
from collections.abc import Callable
from pathlib import Path

from tasks.config.params import ParamsRefusedError

REFUSED = "refused: "
"""How the sentence of a refusal begins, for whoever reads what a stage wrote."""


def main_of(function: Callable[[], object]) -> None:
    """Run a stage's main function; what it refuses becomes one sentence on stderr and exit status 2."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        function()
    except ValueError as error:
        if not isinstance(error, refusals()):
            raise
        sys.stderr.write(f"{REFUSED}{' '.join(str(error).split())}\n")
        raise SystemExit(2) from None


def refusals() -> tuple[type[ValueError], ...]:
    """What a person may be shown without a traceback."""
    from algorithms.errors import EncoderRefusedError, ModelRefusedError, RefusedError
    from algorithms.extension import NotUsable
    from data.schema.errors import DataRefusedError

    return (
        DataRefusedError,
        EncoderRefusedError,
        NotUsable,
        RefusedError,
        ModelRefusedError,
        ParamsRefusedError,
    )


def checkout() -> Path:
    """The checkout this process works in; raises ParamsRefusedError when the current folder is none."""
    root = Path.cwd()
    missing = [name for name in ("params.yaml", "dvc.yaml", ".dvc") if not (root / name).exists()]
    if missing:
        raise ParamsRefusedError(
            f"{root} is no checkout of epsilonflow, it has no {missing[0]}; change to the folder that has."
        )
    return root

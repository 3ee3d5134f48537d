"""The process that tells Weights & Biases of a training while it runs; see `live_curve` for who starts it.

Its input is a line about the training, a line for each row of the curve, and a last line. It ends with its input, so
that nothing is left of a training that was killed. Its output is why it failed, in a line.
"""

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tasks.config.params import Tracking
from tasks.tracking.live_curve import END, LIVE, LIVE_STEP
from tasks.tracking.session import places, reason, session

_SECONDS_TO_FINISH = 15


class Unfinished(Exception):
    """Training did not come to its end, which makes the run at W&B a failed one until it goes on."""


def tell(opening: dict[str, Any], rows: Iterator[dict[str, Any]]) -> None:
    """Logs the rows as they come; raises Unfinished where they end without END."""
    config = {"run_id": opening["run_id"], **opening["about"]}
    with session(
        Tracking.model_validate(opening["settings"]),
        "online",
        run_id=opening["run_id"],
        group=opening["run_id"],
        job_type="train",
        name="{algorithm} on {dataset}, in training".format(**config),
        config=config,
        seconds_to_finish=_SECONDS_TO_FINISH,
    ) as logged:
        logged.define_metric(LIVE_STEP, hidden=True)
        logged.define_metric("live/*", step_metric=LIVE_STEP)
        for row in rows:
            if row == END:
                return
            logged.log({name: row[name] for name in LIVE if name in row})
        raise Unfinished("training did not come to its end.")


def main() -> None:
    """`python -m tasks.tracking.live`, with lines as input."""
    lines = (json.loads(line) for line in sys.stdin)
    opening = next(lines)
    try:
        with contextlib.suppress(Unfinished), places(Path(opening["root"])):
            tell(opening, lines)
    except Exception as error:
        sys.stdout.write(f"{reason(error)}\n")


if __name__ == "__main__":
    main()

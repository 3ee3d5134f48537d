"""Consent of a person to spend: on settings that look wrong, or once more on what was charged before.

A person at a terminal is asked. Without a terminal the run is refused, unless the environment has the consent, see
`tasks.config`. For public records a line of the log is enough.
"""

import logging
import os
import sys
from collections.abc import Sequence

from algorithms.errors import RefusedError
from algorithms.plain_text import for_terminal
from data import DatasetInfo
from tasks.config import SPEND_AGAIN, TRAIN_ANYWAY, has_consent

_LOG = logging.getLogger(__name__)


def confirm_or_refuse(warnings: Sequence[str], info: DatasetInfo, *, epsilon: float) -> None:
    """Ask a person whether to run in spite of the warnings; raises RefusedError unless somebody agrees.

    For public records the warnings are only logged.
    """
    if info.is_public:
        for warning in warnings:
            _LOG.warning("these settings look wrong: %s.", warning)
    elif warnings and not has_consent(TRAIN_ANYWAY):
        reasons = "; and ".join(warnings)
        if not confirm(
            f"these settings look wrong: {reasons}. Spend epsilon {epsilon:g} all the same? [y/N] "
        ):
            raise RefusedError(
                "these settings look wrong, and would spend epsilon {epsilon:g}: {reasons}; or set {variable}=yes"
                " to train all the same.",
                code="consent_needed",
                epsilon=epsilon,
                reasons=reasons,
                variable=TRAIN_ANYWAY,
            )


def confirm(question: str) -> bool:
    """Whether a person at this terminal says yes; False without a terminal."""
    if not sys.stdin.isatty():
        return False
    sys.stderr.write(for_terminal(question))
    sys.stderr.flush()
    try:
        return sys.stdin.readline().strip().lower() in ("y", "yes")
    except OSError:  # a terminal of another session
        return False


def confirm_repeat(what: str, doing: str, epsilon: float, *, has_result: bool, or_else: str = "") -> bool:
    """Whether a person agrees to repeat what is already charged, and to charge it again.

    what: its name and id. doing: what is repeated. or_else: what to do instead. Raises RefusedError if nobody agrees
    and there is no result.
    """
    if has_consent(SPEND_AGAIN) or confirm(
        f"identical {what} exists; {doing} again spends another epsilon={epsilon:g}. Continue? [y/N] "
    ):
        return True
    if has_result:
        return False
    raise RefusedError(
        "identical {what} exists, and {doing} again would spend another epsilon={epsilon:g}; {or_else}set"
        " {variable}=yes.",
        code="consent_needed",
        what=what,
        doing=doing,
        epsilon=epsilon,
        or_else=or_else,
        variable=SPEND_AGAIN,
    )


def confirm_before_stages(warnings: Sequence[str], info: DatasetInfo, *, epsilon: float) -> None:
    """Ask the question for a run on private records before its stages start, since stages cannot ask.

    This process and its child processes do not ask again. Raises RefusedError unless somebody agrees.
    """
    if warnings and not info.is_public and not has_consent(TRAIN_ANYWAY):
        confirm_or_refuse(warnings, info, epsilon=epsilon)
        os.environ[TRAIN_ANYWAY] = "yes"

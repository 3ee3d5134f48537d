"""Scheduled retraining on blocks of data that arrive over time, and its settings.

retrain.yaml says how often a model is retrained, on which blocks, at what price, and when the new one is promoted.
"""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from algorithms.privacy.ledger.policy import Choice, Spread
from tasks.config.params import Group, ParamsRefusedError, in_words, read_yaml

Every = Literal["hour", "day", "week", "month"]
_PERIODS = {"hour": "%Y-%m-%dT%H", "day": "%Y-%m-%d", "week": "%G-W%V", "month": "%Y-%m"}
_NAME = r"^[a-z0-9][a-z0-9_-]*$"


class Retraining(Group):
    """The settings of a scheduled retraining; everything else about a run is in params.yaml.

    name: name of the models, and of the retraining in the ledger. dataset: the data set of params.yaml, whose card has
    `blocks`. every: there is at most one retraining per hour, day, week or month, in UTC. blocks: the blocks that a
    retraining uses. spread: how a block's budget is spread over retrainings. delta: of each run; None keeps the one in
    params.yaml. smallest: a block retires if its next payment would be below this share of its cap. warm_start: start
    from the model in use, which costs nothing. minimal_gain: how much better than the model in use a model must be to
    be promoted, in held-out accuracy or the metric of the target. warn_below: if the caps allow fewer retrainings than
    this, a delivery ends in the state "FewRetrainingsLeft", on which people can be alerted.
    """

    name: Annotated[str, Field(pattern=_NAME)]
    dataset: str = Field(min_length=1)
    every: Every = "week"
    blocks: Choice
    spread: Spread
    delta: float | None = Field(default=None, gt=0, lt=1)
    smallest: float = Field(default=0.01, gt=0, le=1)
    warm_start: bool = False
    minimal_gain: float = Field(default=0.0, ge=-1, le=1)
    warn_below: int = Field(default=0, ge=0, le=100)

    def period(self, now: datetime) -> str:
        """The period of a time: that of the run, not of its schedule, so that late runs all fall into one period."""
        return now.astimezone(UTC).strftime(_PERIODS[self.every])


EXAMPLE = (
    "{name: visits, dataset: visits-weekly, blocks: {policy: last, window: 8},"
    " spread: {policy: equal, planned: 8}}"
)


def load(path: Path) -> Retraining:
    """Load the settings; raises ParamsRefusedError, which names the key."""
    document = read_yaml(
        path, holds="name, dataset, blocks and spread", missing=f"write one, such as {EXAMPLE}"
    )
    try:
        return Retraining.model_validate_json(json.dumps(document, default=str))
    except ValidationError as error:
        raise ParamsRefusedError(
            f"{path.name}: {in_words(error.errors()[0]).rstrip('.')}; correct it."
        ) from None

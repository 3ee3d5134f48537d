"""retrain.yaml: how often a model is trained again, on which blocks, for how much, and when the new one serves."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from algorithms.privacy.ledger import Choice, Choosing, Spread, Spreading
from tasks.config.params import Group, ParamsRefusedError

Every = Literal["hour", "day", "week", "month"]
_PERIODS = {"hour": "%Y-%m-%dT%H", "day": "%Y-%m-%d", "week": "%G-W%V", "month": "%Y-%m"}
_NAME = r"^[a-z0-9][a-z0-9_-]*$"


class BlockChoice(Group):
    """See `algorithms.privacy.ledger.Choice`."""

    policy: Choosing
    window: int | None = None
    at_least: int = Field(default=1, ge=1)


class BudgetSpread(Group):
    """See `algorithms.privacy.ledger.Spread`."""

    policy: Spreading
    planned: int | None = None
    fraction: float | None = None


class Retraining(Group):
    """The settings of a scheduled retraining; all else about a run is in params.yaml.

    name: of the models, and of the retraining in the ledger. dataset: a card with `blocks`, that of params.yaml.
    every: there is at most one retraining in each hour, day, week or month of UTC. blocks: which a retraining uses.
    spread: of a block's budget over those that use it. delta: of each run; None leaves the one in params.yaml.
    smallest: share of its cap below which a block's next payment is of no use, so that it retires.
    warm_start: from the model that serves, which costs nothing. minimal_gain: of held-out accuracy, or
    of what else models for the target are compared by, to be promoted.
    warn_below: with fewer retrainings left that the caps allow, a delivery ends as "FewRetrainingsLeft", of which
    people can be told.
    """

    name: Annotated[str, Field(pattern=_NAME)]
    dataset: str = Field(min_length=1)
    every: Every = "week"
    blocks: BlockChoice
    spread: BudgetSpread
    delta: float | None = Field(default=None, gt=0, lt=1)
    smallest: float = Field(default=0.01, gt=0, le=1)
    warm_start: bool = False
    minimal_gain: float = Field(default=0.0, ge=-1, le=1)
    warn_below: int = Field(default=0, ge=0, le=100)

    @property
    def choice(self) -> Choice:
        """Which blocks; raises RefusedError where its numbers do not fit each other."""
        return Choice(self.blocks.policy, self.blocks.window, self.blocks.at_least)

    @property
    def spreading(self) -> Spread:
        """How budgets are spread; raises RefusedError where its numbers do not fit each other."""
        return Spread(self.spread.policy, self.spread.planned, self.spread.fraction)

    def period(self, now: datetime) -> str:
        """The period of a moment. It is that of the run and not of its schedule: late runs all fall into one."""
        return now.astimezone(UTC).strftime(_PERIODS[self.every])


EXAMPLE = (
    "{name: visits, dataset: visits-weekly, blocks: {policy: last, window: 8},"
    " spread: {policy: equal, planned: 8}}"
)


def load(path: Path) -> Retraining:
    """The settings in a file; raises ParamsRefusedError, naming the key, and RefusedError where two of them do not
    fit.
    """
    try:
        document = YAML(typ="safe", pure=True).load(path)
        settings = Retraining.model_validate(document)
    except OSError:
        raise ParamsRefusedError(f"there is no file {path}; write one, such as {EXAMPLE}.") from None
    except (YAMLError, UnicodeDecodeError):
        raise ParamsRefusedError(f"{path.name} is not valid YAML; correct it.") from None
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "the file"
        raise ParamsRefusedError(f"{path.name}: {key}: {first['msg']}; correct it.") from None
    _ = settings.choice, settings.spreading
    return settings

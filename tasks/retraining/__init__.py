"""Scheduled retraining on blocks of data that arrive over time: its settings, its models and its periods.

retrain.yaml says how often a model is retrained, on which blocks, at what price, and when the new one is promoted.

The registry of models is the folder `models`. Each run has a folder with its model, its privacy card and everything
that `epsilonflow card verify` needs. The link `serving` points to the model in use and is replaced atomically, so a
reader always finds a complete model. The states of the periods are in the home, like the ledger, so no checkout, branch
or server can restore an old state.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path
from typing import Annotated, Literal

from filelock import FileLock, Timeout
from pydantic import Field, JsonValue, ValidationError
from ruamel.yaml import YAML

from algorithms.privacy.ledger import Choice, Spread
from data.documents import load_yaml
from data.files import read_json, write_text
from tasks.config.params import ParamsRefusedError, StrictModel, bad_keys, parse, read_yaml
from tasks.runs.metrics_document import Metrics, read_metrics

Every = Literal["hour", "day", "week", "month"]
_PERIODS = {"hour": "%Y-%m-%dT%H", "day": "%Y-%m-%d", "week": "%G-W%V", "month": "%Y-%m"}
_FILES = (
    "model.safetensors",
    "privacy_card.json",
    "receipt.json",
    "metrics.json",
    "plan.json",
    "trace.parquet",
    "diagnostics.parquet",
)
_SERVING, _EVALUATION = "serving", "evaluation.json"
RECIPE = ("data", "privacy", "features", "algorithm", "model")
_NAME = r"^[a-z0-9][a-z0-9_-]*$"


class RetrainingRecipe(StrictModel):
    """What a retraining trains: groups as in params.yaml, which take the place of those there while it runs.

    data: without the data set and its blocks. privacy: its epsilon matters only to a card that plans `runs`, before the
    first of them; the caps decide that of each retraining.
    """

    data: dict[str, JsonValue] = Field(default_factory=dict)
    privacy: dict[str, JsonValue] = Field(default_factory=dict)
    features: dict[str, JsonValue] = Field(default_factory=lambda: dict[str, JsonValue](name="none"))
    algorithm: dict[str, JsonValue]
    model: dict[str, JsonValue]

    def settings(self, dataset: str, delta: float | None) -> dict[str, object]:
        """The groups for a data set, without its blocks. delta: of each run; None keeps that of the recipe."""
        groups = deepcopy(self.model_dump())
        groups["data"]["dataset"] = dataset
        if delta is not None:
            groups["privacy"]["delta"] = delta
        if groups["privacy"].get("target") is None:
            groups["privacy"].setdefault("epsilon", 1.0)
        return groups

    @classmethod
    def of(cls, text: str) -> "RetrainingRecipe":
        """The recipe in the text of a params.yaml; raises ParamsRefusedError if its groups are not there."""
        document = load_yaml(text)
        groups = {name: dict(document[name]) for name in cls.model_fields if document.get(name)}
        for name in _NOT_OF_A_RECIPE:
            groups.get("data", {}).pop(name, None)
        try:
            return cls.model_validate(groups)
        except ValidationError as error:
            raise bad_keys("params.yaml", error) from None


_NOT_OF_A_RECIPE = ("dataset", "blocks")


class Retraining(StrictModel):
    """The settings of a scheduled retraining; params.yaml adds only where it runs: performance, tracking and ledger.

    name: name of the models, and of the retraining in the ledger. dataset: a data set whose card has `blocks`. every:
    there is at most one retraining per hour, day, week or month, in UTC. blocks: the blocks that a retraining uses.
    spread: how a block's budget is spread over retrainings. delta: of each run; None keeps that of the recipe.
    smallest: a block retires if its next payment would be below this share of its cap. warm_start: start from the model
    in use, which costs nothing. minimal_gain: how much better than the model in use a model must be to be promoted, in
    held-out accuracy or the metric of the target. warn_below: if the caps allow fewer retrainings than this, a delivery
    ends in the state "FewRetrainingsLeft", on which people can be alerted. recipe: what is trained; without it, that of
    the last retraining, or of params.yaml before the first.
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
    recipe: RetrainingRecipe | None = None

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
        settings = Retraining.model_validate_json(json.dumps(document))
    except ValidationError as error:
        raise bad_keys(path.name, error) from None
    if settings.recipe is not None:
        for name in _NOT_OF_A_RECIPE:
            if name in settings.recipe.data:
                raise ParamsRefusedError(
                    "{file}: recipe.data.{name} belongs outside `recipe`; remove it.",
                    code="bad_keys",
                    file=path.name,
                    name=name,
                    keys=(f"recipe.data.{name}",),
                )
        groups = settings.recipe.settings(settings.dataset, settings.delta)
        parse(groups, reads=RECIPE, name=f"the recipe in {path.name}")
    return settings


def write_recipe(path: Path, recipe: RetrainingRecipe) -> None:
    """Write a recipe into the settings at `path`, whose other keys and comments stay."""
    yaml, stream = YAML(), StringIO()
    yaml.width = 120
    document = yaml.load(path.read_text(encoding="utf-8"))
    document["recipe"] = recipe.model_dump()
    yaml.dump(document, stream)
    write_text(path, stream.getvalue())


@dataclass(frozen=True)
class Registry:
    """The models of one name. folder: their folder, created with the first model."""

    folder: Path

    @property
    def serving(self) -> Path | None:
        """The folder of the model in use; None before the first."""
        link = self.folder / _SERVING
        return self.folder / os.readlink(link) if link.is_symlink() else None

    def metrics(self, run_id: str) -> Metrics:
        """The metrics of a run's model, including held-out accuracy and epsilon; empty if it has no model here."""
        path = self.folder / run_id / "metrics.json"
        return read_metrics(path) if path.is_file() else {}

    def add(self, artifacts: Path) -> Path:
        """Add the model in `artifacts` under its run's id, whole or not at all; returns its folder.

        An existing model is left unchanged.
        """
        entry = self.folder / str(read_json(artifacts / "receipt.json")["run_id"])
        if entry.is_dir():
            return entry
        self.folder.mkdir(parents=True, exist_ok=True)
        # In the same folder, so that the rename at the end is atomic: a reader finds all files of a model, or none.
        fresh = Path(tempfile.mkdtemp(prefix=".new-", dir=self.folder))
        try:
            optional = [_EVALUATION] if (artifacts / _EVALUATION).is_file() else []
            for name in (*_FILES, *optional):
                shutil.copyfile(artifacts / name, fresh / name)
            fresh.chmod(0o755)
            fresh.rename(entry)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
        return entry

    def promote(self, entry: Path) -> None:
        """Make the model in the folder `entry` the one in use."""
        # A link cannot be changed. A new one that is renamed over it leaves no moment without a model in use.
        fresh = self.folder / f".{_SERVING}-{os.getpid()}"
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(entry.name)
        fresh.replace(self.folder / _SERVING)


StateKind = Literal["open", "promoted", "kept", "forfeited", "given up"]


@dataclass(frozen=True)
class RetrainingState:
    """A retraining that was begun.

    kind: "open" until it has ended. params: the text of params.yaml that it runs with, so that it is resumed unchanged.
    before: the text that it replaced. root: its checkout. number: its index among all; names of periods do not sort by
    time if they have several lengths or the clock was changed. changes: how its recipe differs from that of the model
    that was in use, as was accepted.
    """

    period: str
    root: str
    params: str
    before: str
    blocks: tuple[str, ...]
    epsilon: float
    kind: StateKind = "open"
    message: str = ""
    run_id: str | None = None
    number: int = 0
    changes: str = ""


@dataclass(frozen=True)
class RetrainingStates:
    """The states of one retraining's periods. folder: their folder, with one file per period."""

    folder: Path

    @contextmanager
    def try_lock(self) -> Iterator[bool]:
        """Lock this retraining within the block; yields False if another process has locked it."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            held = FileLock(self.folder / "lock").acquire(blocking=False)
        except Timeout:
            yield False
            return
        with held:
            yield True

    def of(self, period: str) -> RetrainingState | None:
        """The state of a period; None if it has not begun."""
        path = self._file(period)
        return _read(path) if path.is_file() else None

    def open(self) -> RetrainingState | None:
        """The interrupted retraining, if there is one; there is never more than one."""
        return next((state for state in self.all() if state.kind == "open"), None)

    def all(self) -> list[RetrainingState]:
        """All states, in the order in which they began."""
        states = [_read(path) for path in self.folder.glob("*.json")]
        return sorted(states, key=lambda state: (state.number, state.period))

    def write(self, state: RetrainingState) -> None:
        """Write a state durably."""
        write_text(self._file(state.period), json.dumps(asdict(state), indent=2))

    def forget(self, state: RetrainingState) -> None:
        """Delete the state of a period for which nothing was charged, so that it can start again."""
        self._file(state.period).unlink()

    def _file(self, period: str) -> Path:
        return self.folder / f"{period}.json"


def _read(path: Path) -> RetrainingState:
    document = read_json(path)
    return RetrainingState(**document | {"blocks": tuple(document["blocks"])})

"""The settings of a search: tune.yaml, and the candidates that its space holds."""

import math
from collections.abc import Collection, Mapping
from itertools import product
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Discriminator, Field, JsonValue, Tag, ValidationError, model_validator

from algorithms.extension import check_allowed
from algorithms.privacy.accounting.events import Trials
from data.card import data_card
from data.documents import Document, contradiction
from tasks.config import params
from tasks.config.overrides import with_values
from tasks.config.own_code import named_code, names_in
from tasks.config.params import ParamsRefusedError, StrictModel, bad_keys, read_yaml

READS = params.GROUPS
EXAMPLE = "{space: {algorithm.clip_norm: [0.3, 1.0]}, epsilon: 3.0}"
_MAX_SPACE = 512


class Range(StrictModel):
    """`points` numbers from low to high, both included, with equal distances or equal factors between them."""

    low: float
    high: float
    points: int = Field(ge=2, le=64)
    scale: Literal["linear", "log"] = "log"

    @model_validator(mode="after")
    def _is_a_range(self) -> "Range":
        if not self.low < self.high or (self.scale == "log" and self.low <= 0):
            raise contradiction("a range needs low < high, and low above 0 on a log scale", "low", "high")
        return self

    def values(self) -> list[float]:
        """The points, rounded to six digits; whole ones are ints, as settings such as steps need."""
        between = np.geomspace if self.scale == "log" else np.linspace
        points = [float(f"{value:.6g}") for value in between(self.low, self.high, self.points)]
        return [int(point) if point.is_integer() else point for point in points]


def _kind_of_space(value: object) -> str:
    return "range" if isinstance(value, Mapping | Range) else "values"


CandidateValues = Annotated[
    Annotated[Range, Tag("range")] | Annotated[list[JsonValue], Tag("values")], Discriminator(_kind_of_space)
]


class Draw(StrictModel):
    """How the number of trials is drawn.

    mean: the mean of the number. shape: of the truncated negative binomial distribution; 1 is geometric.
    """

    distribution: Literal["negative_binomial", "poisson"] = "negative_binomial"
    mean: float = Field(default=8.0, ge=1, le=1e4)
    shape: float = Field(default=1.0, ge=0, le=100)

    def trials(self) -> Trials:
        """The distribution in the form that accounting uses."""
        return Trials(self.mean, math.inf if self.distribution == "poisson" else self.shape)


class SearchObjective(StrictModel):
    """What a search maximises.

    on: "public" maximises accuracy, or the metric of the target, on held-out records that the card declares public, and
    is the default where it does. "held_out" maximises the noisy sum of scores of private held-out records, by the same
    release as an evaluation of them, and is the default where they are private. "private" sets aside a share of the
    training records, each by its own coin, and maximises the sum of their `record_scores` with noise of this
    multiplier, which is charged with the trial.
    """

    on: Literal["public", "private", "held_out"] = "public"
    share: float = Field(default=0.1, gt=0, lt=1)
    noise_multiplier: float = Field(default=20.0, gt=0)


class Tuning(StrictModel):
    """tune.yaml; everything else about a trial is in params.yaml.

    space: values by dotted key of params.yaml, as lists or ranges. epsilon, delta: of the whole search; without delta,
    that of params.yaml. show_all: try each setting once, show all trials and pay for all; "cheaper" does so if that
    leaves more epsilon for a trial.
    """

    space: dict[str, CandidateValues] = Field(min_length=1)
    epsilon: float = Field(gt=0)
    delta: Annotated[float, Field(gt=0, lt=1)] | None = None
    trials: Draw = Field(default_factory=Draw)
    objective: SearchObjective = Field(default_factory=SearchObjective)
    show_all: bool | Literal["cheaper"] = False


def load(path: Path, *, allow_code: Collection[str] = ()) -> Tuning:
    """Load the settings; raises ParamsRefusedError if they are invalid.

    allow_code: code of the user's own that they may name; NotUsableError is raised for other code.
    """
    document = read_yaml(
        path, holds="space, epsilon and what else a search needs", missing=f"write one, such as {EXAMPLE}"
    )
    try:
        tuning = Tuning.model_validate(document)
    except ValidationError as error:
        raise bad_keys(path.name, error) from None
    for key, values in tuning.space.items():
        for value in () if isinstance(values, Range) else values:
            for name in names_in(with_values({}, {key: value})):
                check_allowed(name, allow_code, path.name)
    return tuning


def load_here(root: Path, file: Path, *, allow_code: Collection[str] = ()) -> Tuning:
    """Do `load` for a file of the checkout at `root`, which may also name the code that the checkout names.

    Where the held-out records of the checkout's data set are private, the trials are scored on them, unless the file
    says on what.
    """
    tuning = load(root / file, allow_code={*allow_code, *named_code(root)})
    if "on" in tuning.objective.model_fields_set:
        return tuning
    settings = params.load(root / "params.yaml", reads=("data",))
    if data_card(settings.data.dataset, root / "data" / "cards").holdout == "public":
        return tuning
    held_out = tuning.objective.model_copy(update={"on": "held_out"})
    return tuning.model_copy(update={"objective": held_out})


def candidates(tuning: Tuning, base: Document) -> list[Document]:
    """params.yaml with the values of each point of the space, which has keys of algorithm, model and features only."""
    lists = [value.values() if isinstance(value, Range) else value for value in tuning.space.values()]
    for key, values in zip(tuning.space, lists, strict=True):
        if key.partition(".")[0] not in ("algorithm", "model", "features") or not values:
            raise ParamsRefusedError(
                "the space has {key}; give values of keys of algorithm, model or features, at least one each.",
                code="bad_keys",
                key=key,
                keys=(f"space.{key}",),
            )
    if (size := math.prod(map(len, lists))) > _MAX_SPACE:
        raise ParamsRefusedError(
            "the space has {size} settings, at most {largest} are searched; coarsen it.",
            code="bad_keys",
            size=size,
            largest=_MAX_SPACE,
            keys=("space",),
        )
    return [with_values(base, dict(zip(tuning.space, point, strict=True))) for point in product(*lists)]

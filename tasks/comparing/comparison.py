"""What a comparison compares, as strict models of its YAML file."""

import json
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Annotated, Any, Literal, Self

from pydantic import Field, JsonValue, StringConstraints, ValidationError, field_validator, model_validator

from data.description import Transform
from tasks.groups import Group, Memory, Model

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
Word = Annotated[str, StringConstraints(pattern=r"\S")]
Epsilons = Annotated[tuple[Annotated[float, Field(gt=0)], ...], Field(min_length=1)]
Delta = Annotated[float, Field(ge=0, lt=1)]


class Folds(Group):
    """Repeated k-fold cross-validation over the union of training and test records; seed: of the permutations."""

    k: int = Field(ge=2)
    repeats: int = Field(default=1, ge=1)
    seed: int = Field(default=1, ge=0, lt=2**32)


class Problem(Group):
    """A data set by the name of its card, what its records are made into, and a model of the catalogue.

    model_settings: further keys of the group `model` of params.yaml, such as settings, start and freeze; paths are
    relative to the checkout.
    """

    dataset: Word
    model: Word
    transform: Transform = "none"
    model_settings: dict[str, JsonValue] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _has_a_possible_model(self) -> Self:
        keys = Model.model_fields.keys() - {"name", "seed"}
        unknown = sorted(self.model_settings.keys() - keys)
        if unknown:
            raise ValueError(
                f"unknown key model_settings.{unknown[0]}, the keys are {', '.join(sorted(keys))}"
            )
        try:
            Model.model_validate({"name": self.model} | self.model_settings)
        except ValidationError as error:
            problem = error.errors()[0]
            where = ".".join(map(str, ("model_settings", *problem["loc"])))
            raise ValueError(f"{where} is {problem['input']!r}, but {problem['msg']}") from None
        return self


class Method(Group):
    """An algorithm with its settings, and how it is accounted.

    features: the group of params.yaml, for what is learned about the records before training.
    private: False for a reference without noise, which runs once instead of by epsilon. vary: settings by dotted key
    with the values each takes; every combination is a method of its own. by_epsilon: settings by dotted key that are
    other ones at an epsilon, where each is tuned by itself. epsilons, delta: instead of the file's.
    """

    algorithm: dict[str, Any]
    features: dict[str, Any] = Field(default_factory=dict)
    accountant: Literal["pld", "rdp", "pure"] = "pld"
    label: Word | None = None
    private: bool = True
    vary: dict[str, Annotated[tuple[Any, ...], Field(min_length=1)]] = Field(default_factory=dict)
    by_epsilon: dict[float, dict[str, Any]] = Field(default_factory=dict)
    epsilons: Epsilons | None = None
    delta: Delta | None = None

    @field_validator("algorithm")
    @classmethod
    def _has_a_name(cls, algorithm: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(algorithm.get("name"), str):
            raise ValueError("name is missing, give the name of an algorithm")
        return algorithm


class Objective(Group):
    """Mean training loss at the released parameters, plus regularisation times their squared L2 norm."""

    regularisation: float = Field(default=0.0, ge=0)


class Record(Group):
    """What is computed of each run beside its accuracy.

    curves: the objective by step, at most about 200 points. diagnostics: what clipping and noise did to each gradient,
    of the first seed or fold alone.
    """

    objective: Objective | None = None
    curves: bool = False
    diagnostics: bool = False


class Comparison(Group):
    """Algorithms x data sets x models x epsilons x (seeds or folds) x settings.

    skip_refused: list what cannot run as refused instead of refusing the whole. published: a CSV file of published
    numbers, by its path in the checkout. performance: of each run; as many run at once as there are workers.
    """

    name: Name
    title: Word
    delta: Delta
    epsilons: Epsilons
    seeds: int = Field(default=1, ge=1)
    folds: Folds | None = None
    problems: tuple[Problem, ...] = Field(min_length=1)
    methods: dict[Name, Method] = Field(min_length=1)
    record: Record = Record()
    skip_refused: bool = False
    published: Word | None = None
    performance: Memory = Memory()


class Variant(Group):
    """A method with one combination of its varied settings.

    setting: that combination in words, or empty. by_epsilon: settings by dotted key that are other ones at an epsilon.
    """

    method: str
    label: str
    setting: str
    algorithm: dict[str, Any]
    by_epsilon: dict[float, dict[str, Any]]
    features: dict[str, Any]
    accountant: Literal["pld", "rdp", "pure"]
    private: bool
    epsilons: tuple[float, ...]
    delta: float

    def at(self, epsilon: float | None) -> dict[str, Any]:
        """The algorithm's settings at an epsilon, None for a method without noise."""
        return _changed(self.algorithm, {} if epsilon is None else self.by_epsilon.get(epsilon, {}))


def variants(comparison: Comparison) -> Iterator[Variant]:
    """Each method with each combination of its varied settings, in the order of the file."""
    for key, method in comparison.methods.items():
        for values in product(*method.vary.values()):
            changes = dict(zip(method.vary, values, strict=True))
            setting = ", ".join(f"{name}={_text(value)}" for name, value in changes.items())
            label = method.label or key
            yield Variant(
                method=key,
                label=f"{label} ({setting})" if setting else label,
                setting=setting,
                algorithm=_changed(method.algorithm, changes),
                by_epsilon=method.by_epsilon,
                features=method.features,
                accountant=method.accountant,
                private=method.private,
                epsilons=method.epsilons or comparison.epsilons,
                delta=delta_of(method, comparison),
            )


def delta_of(method: Method, comparison: Comparison) -> float:
    """The delta of a method's runs."""
    if method.delta is not None:
        return method.delta
    return 0.0 if method.accountant == "pure" else comparison.delta


def _changed(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with values put at dotted keys, whose outer keys are made where they are missing."""
    result: dict[str, Any] = json.loads(json.dumps(settings))
    for dotted, value in changes.items():
        *outer, last = dotted.split(".")
        place = result
        for key in outer:
            place = place.setdefault(key, {})
        place[last] = value
    return result


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)

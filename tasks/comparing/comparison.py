"""The YAML file of a comparison as strict models; a faulty file is refused in one sentence that names the key."""

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, JsonValue, StringConstraints, ValidationError, field_validator, model_validator

from data.description import Transform
from tasks.config.overrides import with_values
from tasks.config.params import Encoder, Group, Memory, Model, ParamsRefusedError, in_words, read_yaml

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
Word = Annotated[str, StringConstraints(pattern=r"\S")]
Epsilons = Annotated[tuple[Annotated[float, Field(gt=0)], ...], Field(min_length=1)]
Delta = Annotated[float, Field(ge=0, lt=1)]


class Folds(Group):
    """Repeated k-fold cross-validation over the union of training and test records; seed: seed of the permutations."""

    k: int = Field(ge=2)
    repeats: int = Field(default=1, ge=1)
    seed: int = Field(default=1, ge=0, lt=2**32)


class Problem(Group):
    """A data set by the name of its card, a transform of its records, and a model of the catalogue.

    encoder: as in params.yaml, if transform is encoder. model_settings: further keys of the group `model` of
    params.yaml, such as settings, start and freeze; paths are relative to the checkout.
    """

    dataset: Word
    model: Word
    transform: Transform = "none"
    encoder: Encoder | None = None
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
            raise ValueError(in_words(error.errors()[0], "model_settings")) from None
        return self


class Method(Group):
    """An algorithm with its settings, and its accountant.

    features: the group of params.yaml, for features that are learned before training. private: False for a reference
    without noise, which runs once instead of once per epsilon. vary: settings by dotted key with their values; every
    combination is a separate method. by_epsilon: settings by dotted key that differ at an epsilon, if each epsilon is
    tuned separately. epsilons, delta: replace the file's.
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
    """What is recorded of each run besides its accuracy.

    curves: the objective by step, at most about 200 points. diagnostics: what clipping and noise did to each gradient,
    only for the first seed or fold.
    """

    objective: Objective | None = None
    curves: bool = False
    diagnostics: bool = False


class Comparison(Group):
    """Algorithms x data sets x models x epsilons x (seeds or folds) x settings.

    skip_refused: list cells that cannot run as refused, instead of refusing the whole comparison. published: path in
    the checkout of a CSV file of published numbers. performance: limits of each run; one run per worker runs at a time.
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


class Variant(Method):
    """A method with one combination of its varied settings; what it leaves to the file is filled in.

    method: its name in the file. setting: that combination in words, or empty.
    """

    method: str
    setting: str
    label: str
    epsilons: Epsilons
    delta: Delta

    def at(self, epsilon: float | None) -> dict[str, Any]:
        """The algorithm's settings at an epsilon, None for a method without noise."""
        return with_values(self.algorithm, {} if epsilon is None else self.by_epsilon.get(epsilon, {}))


def variants(comparison: Comparison) -> Iterator[Variant]:
    """Each method with each combination of its varied settings, in the order of the file."""
    for key, method in comparison.methods.items():
        for values in product(*method.vary.values()):
            changes = dict(zip(method.vary, values, strict=True))
            setting = ", ".join(f"{name}={_text(value)}" for name, value in changes.items())
            label = method.label or key
            own = {
                "method": key,
                "label": f"{label} ({setting})" if setting else label,
                "setting": setting,
                "algorithm": with_values(method.algorithm, changes),
                "epsilons": method.epsilons or comparison.epsilons,
                "delta": delta_of(method, comparison),
            }
            yield Variant(**dict(method) | own)


def delta_of(method: Method, comparison: Comparison) -> float:
    """The delta of a method's runs."""
    if method.delta is not None:
        return method.delta
    return 0.0 if method.accountant == "pure" else comparison.delta


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def load(path: Path) -> Comparison:
    """Load the comparison that the YAML file at `path` describes; data sets are not looked up yet.

    Raises ParamsRefusedError for a file that is not YAML, unknown keys, wrong types and impossible values.
    """
    document = read_yaml(
        path, holds="keys with values, such as name and methods", missing="give the file of a comparison"
    )
    try:
        comparison = Comparison.model_validate_json(json.dumps(document))
    except TypeError:
        raise ParamsRefusedError(
            f"{path.name} must hold plain texts, numbers and lists; put dates in quotes."
        ) from None
    except ValidationError as error:
        raise ParamsRefusedError(f"{path.name}: {in_words(error.errors()[0])}; correct it.") from None
    if comparison.name != path.stem:
        raise ParamsRefusedError(
            f"{path.name}: name must be {path.stem!r}, the name of the file; correct it."
        )
    _check_once("epsilons", comparison.epsilons, path)
    _check_once("problems", comparison.problems, path)
    # results are identified by these two
    _check_once("problems", [(problem.dataset, problem.model) for problem in comparison.problems], path)
    _check_once("variants of methods", [(v.method, v.setting) for v in variants(comparison)], path)
    for key, method in comparison.methods.items():
        _check_delta(key, method, comparison, path)
        _check_epsilons(key, method, comparison, path)
    return comparison


def _check_once(what: str, values: Any, path: Path) -> None:
    kept: list[Any] = []
    for value in values:
        if value in kept:
            raise ParamsRefusedError(f"{path.name}: {what} list {value} twice; leave one of them out.")
        kept.append(value)


def _check_delta(key: str, method: Method, comparison: Comparison, path: Path) -> None:
    if method.private and delta_of(method, comparison) == 0 and method.accountant != "pure":
        raise ParamsRefusedError(
            f"{path.name}: methods.{key}.accountant is {method.accountant}, which needs a delta above 0;"
            " set delta, or the accountant to pure."
        )


def _check_epsilons(key: str, method: Method, comparison: Comparison, path: Path) -> None:
    unknown = sorted(set(method.by_epsilon) - set(method.epsilons or comparison.epsilons))
    if unknown:
        raise ParamsRefusedError(
            f"{path.name}: methods.{key}.by_epsilon has settings for epsilon {unknown[0]:g}, which is not compared;"
            " leave it out, or add it to the epsilons."
        )

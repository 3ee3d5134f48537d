"""A comparison: its YAML file as strict models, and its trials, one run each.

A faulty file is refused in one sentence that names the key. A trial is identified by a digest of everything that
decides its result.
"""

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
import pandas as pd
from pydantic import Field, JsonValue, StringConstraints, ValidationError, field_validator, model_validator

from algorithms.core.settings import adapter
from algorithms.errors import RefusedError
from algorithms.extension import check_allowed, is_own, source_digest
from algorithms.features import from_settings as features_from_settings
from algorithms.methods import from_settings
from algorithms.models import CATALOGUE as MODELS
from data import DataCard
from data.description import Transform
from data.documents import contradiction
from tasks.calibrate import model_files
from tasks.config.overrides import with_values
from tasks.config.params import (
    DataParams,
    EncoderParams,
    MemoryParams,
    ModelParams,
    ParamsRefusedError,
    StrictModel,
    bad_keys,
    in_words,
    keys_of,
    read_yaml,
)
from tasks.prepare import facts_of, info_of
from tasks.refusals import PIPELINE
from tasks.runs.metrics import HELD_OUT_METRICS

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
Word = Annotated[str, StringConstraints(pattern=r"\S")]
Epsilons = Annotated[tuple[Annotated[float, Field(gt=0)], ...], Field(min_length=1)]
Delta = Annotated[float, Field(ge=0, lt=1)]
FORMAT = 1
"""Version of a trial's result. Raise it if the computation changes; every trial then runs again."""
COLUMNS = ("figure", "dataset", "model", "method", "setting", "epsilon", "metric", "value")
"""Of published numbers."""
METRICS = (*HELD_OUT_METRICS, "objective", "gap", "test_loss")
_MAX_GROUP_SIZE = 20
_DIGITS = 24


class Folds(StrictModel):
    """Repeated k-fold cross-validation over the union of training and test records; seed: seed of the permutations."""

    k: int = Field(ge=2)
    repeats: int = Field(default=1, ge=1)
    seed: int = Field(default=1, ge=0, lt=2**32)


class Problem(StrictModel):
    """A data set by the name of its card, a transform of its records, and a model of the catalogue.

    encoder: as in params.yaml, if transform is encoder. model_settings: further keys of the group `model` of
    params.yaml, such as settings, start and freeze; paths are relative to the checkout.
    """

    dataset: Word
    model: Word
    transform: Transform = "none"
    encoder: EncoderParams | None = None
    model_settings: dict[str, JsonValue] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _has_a_possible_model(self) -> Self:
        keys = ModelParams.model_fields.keys() - {"name", "seed"}
        unknown = sorted(self.model_settings.keys() - keys)
        if unknown:
            raise contradiction(
                f"unknown key model_settings.{unknown[0]}, the keys are {', '.join(sorted(keys))}",
                f"model_settings.{unknown[0]}",
            )
        try:
            ModelParams.model_validate({"name": self.model} | self.model_settings)
        except ValidationError as error:
            problem = error.errors()[0]
            raise contradiction(
                in_words(problem, "model_settings"), *keys_of(problem, "model_settings")
            ) from None
        return self


class Method(StrictModel):
    """An algorithm with its settings, and its accountant.

    features: the group of params.yaml, for features that are learned before training. private: False for a reference
    without noise, which runs once instead of once per epsilon. vary: settings by dotted key with their values; every
    combination is a separate method. by_epsilon: settings by dotted key that differ at an epsilon, if each epsilon is
    tuned separately; those of the features begin with "features.". epsilons, delta: replace the file's.
    """

    algorithm: dict[str, JsonValue]
    features: dict[str, JsonValue] = Field(default_factory=dict)
    accountant: Literal["pld", "rdp", "pure"] = "pld"
    label: Word | None = None
    private: bool = True
    vary: dict[str, Annotated[tuple[Any, ...], Field(min_length=1)]] = Field(default_factory=dict)
    by_epsilon: dict[float, dict[str, JsonValue]] = Field(default_factory=dict)
    epsilons: Epsilons | None = None
    delta: Delta | None = None

    @field_validator("algorithm")
    @classmethod
    def _has_a_name(cls, algorithm: dict[str, JsonValue]) -> dict[str, JsonValue]:
        if not isinstance(algorithm.get("name"), str):
            raise ValueError("name is missing, give the name of an algorithm")
        return algorithm


class TrainingObjective(StrictModel):
    """Mean training loss at the released parameters, plus regularisation times their squared L2 norm."""

    regularisation: float = Field(default=0.0, ge=0)


class RecordedResults(StrictModel):
    """What is recorded of each run besides its accuracy.

    curves: the objective by step, at most about 200 points. diagnostics: what clipping and noise did to each gradient,
    only for the first seed or fold.
    """

    objective: TrainingObjective | None = None
    curves: bool = False
    diagnostics: bool = False


class Comparison(StrictModel):
    """Algorithms x data sets x models x epsilons x (seeds or folds) x settings.

    skip_refused: list trials that cannot run as refused, instead of refusing the whole comparison. published: path in
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
    record: RecordedResults = RecordedResults()
    skip_refused: bool = False
    published: Word | None = None
    performance: MemoryParams = MemoryParams()


_OF_FEATURES = "features."


class Variant(Method):
    """A method with one combination of its varied settings; what it leaves to the file is filled in.

    method: its name in the file. setting: that combination in words, or empty.
    """

    method: str
    setting: str
    label: str
    epsilons: Epsilons
    delta: Delta

    def at(self, epsilon: float | None) -> dict[str, JsonValue]:
        """The algorithm's settings at an epsilon, None for a method without noise."""
        return with_values(self.algorithm, self._changes(epsilon, of_features=False))

    def features_at(self, epsilon: float | None) -> dict[str, JsonValue]:
        """The features' settings at an epsilon, None for a method without noise."""
        return with_values(self.features, self._changes(epsilon, of_features=True))

    def _changes(self, epsilon: float | None, *, of_features: bool) -> dict[str, JsonValue]:
        return {
            key.removeprefix(_OF_FEATURES): value
            for key, value in ({} if epsilon is None else self.by_epsilon.get(epsilon, {})).items()
            if key.startswith(_OF_FEATURES) == of_features
        }


def variants(comparison: Comparison) -> Iterator[Variant]:
    """Each method with each combination of its varied settings, in the order of the file."""
    for key, method in comparison.methods.items():
        for values in product(*method.vary.values()):
            changes = dict(zip(method.vary, values, strict=True))
            setting = ", ".join(f"{name}={_text(value)}" for name, value in changes.items())
            label = method.label or key
            settings = {
                "method": key,
                "label": f"{label} ({setting})" if setting else label,
                "setting": setting,
                "algorithm": with_values(method.algorithm, changes),
                "epsilons": method.epsilons or comparison.epsilons,
                "delta": delta_of(method, comparison),
            }
            yield Variant(**dict(method) | settings)


def delta_of(method: Method, comparison: Comparison) -> float:
    """The delta of a method's runs."""
    if method.delta is not None:
        return method.delta
    return 0.0 if method.accountant == "pure" else comparison.delta


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def load(path: Path, *, allow_code: Collection[str] = ()) -> Comparison:
    """Load the comparison that the YAML file at `path` describes; data sets are not looked up yet.

    allow_code: code of the user's own that it may name; NotUsableError is raised for other code. Raises
    ParamsRefusedError for a file that is not YAML, unknown keys, wrong types and impossible values.
    """
    document = read_yaml(
        path, holds="keys with values, such as name and methods", missing="give the file of a comparison"
    )
    try:
        comparison = Comparison.model_validate_json(json.dumps(document))
    except TypeError:
        raise ParamsRefusedError(
            "{name} must hold plain texts, numbers and lists; put dates in quotes.",
            code="unreadable_file",
            name=path.name,
            path=path,
        ) from None
    except ValidationError as error:
        raise bad_keys(path.name, error) from None
    if comparison.name != path.stem:
        raise ParamsRefusedError(
            "{file}: name must be {expected!r}, the name of the file; correct it.",
            code="bad_keys",
            file=path.name,
            expected=path.stem,
            keys=("name",),
        )
    for name in _names(comparison):
        check_allowed(name, allow_code, path.name)
    _check_once("epsilons", comparison.epsilons, path)
    _check_once("problems", comparison.problems, path)
    # results are identified by these two
    _check_once("problems", [(problem.dataset, problem.model) for problem in comparison.problems], path)
    _check_once("variants of methods", [(v.method, v.setting) for v in variants(comparison)], path)
    for key, method in comparison.methods.items():
        if method.private and delta_of(method, comparison) == 0 and method.accountant != "pure":
            raise ParamsRefusedError(
                "{file}: methods.{method}.accountant is {accountant}, which needs a delta above 0;"
                " set delta, or the accountant to pure.",
                code="bad_keys",
                file=path.name,
                method=key,
                accountant=method.accountant,
                keys=(f"methods.{key}.accountant", "delta"),
            )
        if unknown := sorted(set(method.by_epsilon) - set(method.epsilons or comparison.epsilons)):
            raise ParamsRefusedError(
                "{file}: methods.{method}.by_epsilon has settings for epsilon {epsilon:g}, which is not compared;"
                " leave it out, or add it to the epsilons.",
                code="bad_keys",
                file=path.name,
                method=key,
                epsilon=unknown[0],
                keys=(f"methods.{key}.by_epsilon", "epsilons"),
            )
    return comparison


def _names(comparison: Comparison) -> Iterator[str]:
    """What the comparison names that may be code: models, encoders, methods and features."""
    for problem in comparison.problems:
        yield problem.model
        yield from () if problem.encoder is None else (problem.encoder.name,)
    for variant in variants(comparison):
        yield from (str(variant.at(epsilon)["name"]) for epsilon in (None, *variant.by_epsilon))
        yield str(variant.features.get("name"))


def _check_once(what: str, values: Any, path: Path) -> None:
    seen: list[Any] = []
    for value in values:
        if value in seen:
            raise ParamsRefusedError(
                "{file}: {what} list {value} twice; leave one of them out.",
                code="bad_keys",
                file=path.name,
                what=what,
                value=value,
                keys=(what.rpartition(" ")[2],),
            )
        seen.append(value)


@dataclass(frozen=True)
class Fold:
    """One fold of a repeated cross-validation: `fold` of `k`, in the permutation of (seed, repeat)."""

    k: int
    seed: int
    repeat: int
    fold: int


@dataclass(frozen=True)
class Trial:
    """One run of a comparison.

    card: digest of the data card. settings: all settings of the algorithm, including `name`. epsilon: None for a method
    without noise. seed: seed of the noise and of the model's initialisation. fold: None for the data's own split.
    transform: transform of the records. encoder: the encoder, if transform is encoder. model_settings: further keys of
    the group `model` of params.yaml, and the SHA-256 of their files. features: the complete group of params.yaml.
    """

    dataset: str
    card: str
    model: str
    method: str
    label: str
    setting: str
    settings: dict[str, JsonValue]
    accountant: str
    epsilon: float | None
    delta: float
    seed: int
    fold: Fold | None
    record: dict[str, Any]
    transform: Transform = "none"
    model_settings: dict[str, JsonValue] = field(default_factory=dict)
    features: dict[str, JsonValue] = field(default_factory=dict)
    encoder: dict[str, JsonValue] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """A digest of everything that decides the result; labels are not included."""
        inputs = asdict(self) | {"format": FORMAT}
        for name in ("method", "label", "setting"):
            del inputs[name]
        # Without empty values: the noise's seed is this digest, and trials that are published keep their noise.
        if self.transform == "none":
            del inputs["transform"]
        for name in ("model_settings", "features", "encoder"):
            if not inputs[name]:
                del inputs[name]
        return digest_of(inputs)

    @property
    def model_group(self) -> dict[str, JsonValue]:
        """The group `model` of params.yaml for this trial."""
        chosen = {key: value for key, value in self.model_settings.items() if key != "files"}
        return {"name": self.model, "seed": self.seed, **chosen}

    @property
    def noise_seed(self) -> int:
        """The seed of the noise, different for different trials."""
        return int(self.digest, 16)

    @property
    def is_diagnosed(self) -> bool:
        """Whether diagnostics are recorded."""
        return self.is_first and bool(self.record.get("diagnostics"))

    @property
    def is_first(self) -> bool:
        """Whether this is the first seed and fold, whose noise trace is kept."""
        return self.seed == 0 and (self.fold is None or (self.fold.repeat, self.fold.fold) == (0, 0))


TrialGroup = tuple[Trial, ...]
"""A few trials with the same data set, model, method and epsilon."""


def digest_of(document: object) -> str:
    """A short SHA-256 of a JSON document."""
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:_DIGITS]


def trials(comparison: Comparison, cards: dict[str, DataCard], *, file: str) -> list[Trial]:
    """All trials, in the order of the file. cards: the card of each data set. file: name of the file, for messages.

    Raises:
        ParamsRefusedError: if a data set is private, or a model, algorithm or setting is unknown.
        ModelRefusedError: if a model's file is missing.
        DataRefusedError: if the records cannot have a transform.
    """
    for problem in comparison.problems:
        _check_problem(problem, cards[problem.dataset], file)
    cases = _settings_at_epsilons(comparison, file)
    folds: list[Fold | None] = [None]
    if (cut := comparison.folds) is not None:
        folds = [
            Fold(cut.k, cut.seed, *repeat_and_fold)
            for repeat_and_fold in product(range(cut.repeats), range(cut.k))
        ]
    # A trial's digest decides whether its result is there, so that what is left at its default must not be in it.
    recorded = comparison.record.model_dump()
    if not comparison.record.diagnostics:
        del recorded["diagnostics"]  # as in `Trial.digest`
    digests = {name: digest_of(card.model_dump_json()) for name, card in cards.items()}
    problems = [
        (
            problem,
            model_files(ModelParams.model_validate({"name": problem.model} | problem.model_settings)),
            {}
            if problem.encoder is None
            else problem.encoder.model_dump() | {"sha256": facts_of(problem.encoder).sha256},
        )
        for problem in comparison.problems
    ]
    return [
        Trial(
            dataset=problem.dataset,
            card=digests[problem.dataset],
            model=problem.model,
            method=variant.method,
            label=variant.label,
            setting=variant.setting,
            settings=settings,
            accountant=variant.accountant,
            epsilon=epsilon,
            delta=variant.delta if variant.private else 0.0,
            seed=seed,
            fold=fold,
            record=recorded,
            transform=problem.transform,
            model_settings=_model_settings(
                problem,
                files,
                (problem.model, str(settings["name"]), str(variant.features.get("name", "none"))),
            ),
            features=features,
            encoder=encoder,
        )
        for problem, files, encoder in problems
        for variant, epsilon, settings, features in cases
        for seed, fold in product(range(comparison.seeds), folds)
    ]


def _settings_at_epsilons(
    comparison: Comparison, file: str
) -> list[tuple[Variant, float | None, dict[str, JsonValue], dict[str, JsonValue]]]:
    """Each variant at each epsilon, with the settings of its method and of its features."""
    return [
        (
            variant,
            epsilon,
            _complete(variant.at(epsilon), from_settings, f"methods.{variant.method}.algorithm", file),
            _features(variant, epsilon, file),
        )
        for variant in variants(comparison)
        for epsilon in (variant.epsilons if variant.private else (None,))
    ]


def groups(wanted: Sequence[Trial]) -> Iterator[TrialGroup]:
    """Group the trials by data set, transform, model, method and epsilon, at most 20 in each group."""
    together: dict[tuple[Any, ...], list[Trial]] = {}
    for trial in wanted:
        encoder = digest_of(trial.encoder)
        key = (
            trial.dataset,
            trial.transform,
            encoder,
            trial.model,
            trial.method,
            trial.setting,
            trial.epsilon,
        )
        together.setdefault(key, []).append(trial)
    for members in together.values():
        for start in range(0, len(members), _MAX_GROUP_SIZE):
            yield tuple(members[start : start + _MAX_GROUP_SIZE])


def code_digest() -> str:
    """A digest of the algorithms' source code, which distinguishes results of different versions."""
    import algorithms

    folder = Path(next(iter(algorithms.__path__)))
    files = sorted(folder.rglob("*.py"))
    return digest_of([[str(file.relative_to(folder)), file.read_text(encoding="utf-8")] for file in files])


def _model_settings(problem: Problem, files: dict[str, str], named: Iterable[str]) -> dict[str, JsonValue]:
    """The settings with the digests of files and of the user's own code, so that another file is another trial.

    named: what the trial names, of which `package.module:factory` is the user's own.
    """
    digests: dict[str, JsonValue] = {**files, **{name: source_digest(name) for name in named if is_own(name)}}
    return {**problem.model_settings, "files": digests} if digests else problem.model_settings


def _check_problem(problem: Problem, card: DataCard, file: str) -> None:
    if not card.public:
        raise ParamsRefusedError(
            "{file}: the records of {dataset!r} are private, and a comparison as a whole is charged to"
            " nobody; compare on public data sets.",
            code="bad_keys",
            file=file,
            dataset=problem.dataset,
            keys=("problems.dataset",),
        )
    info_of(card, DataParams(dataset=card.name, transform=problem.transform, encoder=problem.encoder))
    if problem.model not in MODELS and not is_own(problem.model):
        raise ParamsRefusedError(
            "{file}: there is no model {model!r}; choose one of {choices}.",
            code="bad_keys",
            file=file,
            model=problem.model,
            choices=", ".join(MODELS),
            keys=("problems.model",),
        )


def _features(variant: Variant, epsilon: float | None, file: str) -> dict[str, JsonValue]:
    """The settings of the learned features at an epsilon, complete; empty if there are none."""
    chosen = variant.features_at(epsilon)
    if chosen in ({}, {"name": "none"}):
        return {}
    return _complete(chosen, features_from_settings, f"methods.{variant.method}.features", file)


def _complete(
    settings: dict[str, JsonValue], make: Callable[[dict[str, JsonValue]], object], key: str, file: str
) -> dict[str, JsonValue]:
    """The settings with every default filled in, so that a changed default changes the trial.

    make: the factory of the object that they are for; the settings of a user's own code stay as they are. key: where
    they are in the file, for messages.
    """
    try:
        instance = make(settings)
    except RefusedError as refusal:
        raise ParamsRefusedError(
            "{file}: {key}.name: {problem}",
            code="bad_keys",
            file=file,
            key=key,
            problem=PIPELINE.sentence(refusal),
            keys=(f"{key}.name",),
        ) from None
    except ValidationError as error:
        raise bad_keys(file, error, key) from None
    if is_own(str(settings["name"])):
        return settings
    filled: dict[str, JsonValue] = adapter(type(instance)).dump_python(instance, mode="json")
    return {"name": settings["name"]} | filled


def read_published(path: Path) -> pd.DataFrame:
    """Read a CSV file of published numbers, one per row.

    dataset, model, method: names as in the comparison's file. setting: of a varied method, or empty. epsilon: empty for
    a method without noise. metric: a metric of the target, such as accuracy, r2 or micro_f1; or objective, gap (the
    objective minus the smallest known) or test_loss.

    Raises ParamsRefusedError if the file is missing, has other columns, or has an unknown metric or an invalid number.
    """
    try:
        table = pd.read_csv(path, dtype=str, keep_default_na=False, comment="#")
    except (OSError, ValueError):
        raise ParamsRefusedError(
            "{path} is no CSV file of published numbers; correct published.",
            code="unreadable_file",
            path=path,
        ) from None
    if tuple(table.columns) != COLUMNS:
        raise ParamsRefusedError(
            "{path} must have the columns {columns}; correct it.",
            code="bad_published",
            path=path,
            columns=", ".join(COLUMNS),
        )
    unknown = sorted(set(table["metric"]) - set(METRICS))
    if unknown:
        raise ParamsRefusedError(
            "{path}: the metric {metric!r} is not one of {metrics}.",
            code="bad_published",
            path=path,
            metric=unknown[0],
            metrics=", ".join(METRICS),
        )
    for name in ("epsilon", "value"):
        table[name] = _numbers(table[name], path)
    return table


def _numbers(texts: pd.Series, path: Path) -> pd.Series:
    numbers = pd.to_numeric(texts.where(texts != "", "nan"), errors="coerce")
    wrong = texts[(texts != "") & ~np.isfinite(numbers)]
    if len(wrong):
        raise ParamsRefusedError(
            "{path}: {column} is {value!r}, but should be a number; correct it.",
            code="bad_published",
            path=path,
            column=wrong.name,
            value=wrong.iloc[0],
        )
    return numbers

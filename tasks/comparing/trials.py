"""The cells of a comparison: one run each, identified by a digest of everything that decides its result."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from algorithms.core.method import adapter
from algorithms.errors import RefusedError
from algorithms.extension import is_own, source_digest
from algorithms.features import from_settings as features_from_settings
from algorithms.methods import from_settings
from algorithms.models import CATALOGUE as MODELS
from data import DataCard
from data.description import Transform
from tasks.calibrate import model_files
from tasks.comparing.comparison import Comparison, Problem, Variant, variants
from tasks.config.params import Data, Model, ParamsRefusedError, in_words
from tasks.runs.encoders import facts_of, public_of

FORMAT = 1
"""Version of a cell's result. Raise it if the computation changes; every cell then runs again."""
_MOST_IN_A_GROUP = 20
_DIGITS = 24


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
    settings: dict[str, Any]
    accountant: str
    epsilon: float | None
    delta: float
    seed: int
    fold: Fold | None
    record: dict[str, Any]
    transform: Transform = "none"
    model_settings: dict[str, Any] = field(default_factory=dict)
    features: dict[str, Any] = field(default_factory=dict)
    encoder: dict[str, Any] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """A digest of everything that decides the result; labels are not included."""
        inputs = asdict(self) | {"format": FORMAT}
        for name in ("method", "label", "setting"):
            del inputs[name]
        # Empty values are left out, so that cells from before these keys existed stay valid.
        if self.transform == "none":
            del inputs["transform"]
        for name in ("model_settings", "features", "encoder"):
            if not inputs[name]:
                del inputs[name]
        return digest_of(inputs)

    @property
    def model_group(self) -> dict[str, Any]:
        """The group `model` of params.yaml for this cell."""
        chosen = {key: value for key, value in self.model_settings.items() if key != "files"}
        return {"name": self.model, "seed": self.seed} | chosen

    @property
    def noise_seed(self) -> int:
        """The seed of the noise, different for different cells."""
        return int(self.digest, 16)

    @property
    def is_diagnosed(self) -> bool:
        """Whether diagnostics are recorded."""
        return self.is_first and bool(self.record.get("diagnostics"))

    @property
    def is_first(self) -> bool:
        """Whether this is the first seed and fold, whose noise trace is kept."""
        return self.seed == 0 and (self.fold is None or (self.fold.repeat, self.fold.fold) == (0, 0))


Group = tuple[Trial, ...]
"""A few cells with the same data set, model, method and epsilon."""


def digest_of(document: object) -> str:
    """A short SHA-256 of a JSON document."""
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:_DIGITS]


def cells(comparison: Comparison, cards: dict[str, DataCard], *, file: str) -> list[Trial]:
    """All cells, in the order of the file. cards: the card of each data set. file: name of the file, for messages.

    Raises:
        ParamsRefusedError: if a data set is private, or a model, algorithm or setting is unknown.
        ModelRefusedError: if a model's file is missing.
        DataRefusedError: if the records cannot have a transform.
    """
    for problem in comparison.problems:
        _check_problem(problem, cards[problem.dataset], file)
    known = [
        (
            variant,
            epsilon,
            _complete(variant.at(epsilon), from_settings, f"methods.{variant.method}.algorithm", file),
        )
        for variant in variants(comparison)
        for epsilon in (variant.epsilons if variant.private else (None,))
    ]
    recorded = comparison.record.model_dump()
    if not comparison.record.diagnostics:
        del recorded["diagnostics"]  # left out, so that cells from before this key existed stay valid
    digests = {name: digest_of(card.model_dump_json()) for name, card in cards.items()}
    found = [
        (
            problem,
            model_files(Model.model_validate({"name": problem.model} | problem.model_settings)),
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
                problem, files, (problem.model, settings["name"], variant.features.get("name", "none"))
            ),
            features=_features(variant, file),
            encoder=encoder,
        )
        for problem, files, encoder in found
        for variant, epsilon, settings in known
        for seed, fold in product(range(comparison.seeds), _folds(comparison))
    ]


def groups(wanted: Sequence[Trial]) -> Iterator[Group]:
    """Group the cells by data set, transform, model, method and epsilon, at most 20 in each group."""
    together: dict[tuple[Any, ...], list[Trial]] = {}
    for cell in wanted:
        encoder = digest_of(cell.encoder)
        key = (cell.dataset, cell.transform, encoder, cell.model, cell.method, cell.setting, cell.epsilon)
        together.setdefault(key, []).append(cell)
    for members in together.values():
        for start in range(0, len(members), _MOST_IN_A_GROUP):
            yield tuple(members[start : start + _MOST_IN_A_GROUP])


def code_digest() -> str:
    """A digest of the algorithms' source code, which distinguishes results of different versions."""
    import algorithms

    folder = Path(next(iter(algorithms.__path__)))
    files = sorted(folder.rglob("*.py"))
    return digest_of([[str(file.relative_to(folder)), file.read_text(encoding="utf-8")] for file in files])


def _folds(comparison: Comparison) -> Sequence[Fold | None]:
    chosen = comparison.folds
    if chosen is None:
        return [None]
    places = product(range(chosen.repeats), range(chosen.k))
    return [Fold(chosen.k, chosen.seed, repeat, fold) for repeat, fold in places]


def _model_settings(problem: Problem, files: dict[str, str], named: Iterable[str]) -> dict[str, Any]:
    """The settings with the digests of files and of the user's own code, so that another file is another cell.

    named: what the cell names, of which `package.module:factory` is the user's own.
    """
    files = files | {name: source_digest(name) for name in named if is_own(name)}
    return problem.model_settings | ({"files": files} if files else {})


def _check_problem(problem: Problem, card: DataCard, file: str) -> None:
    if not card.public:
        raise ParamsRefusedError(
            f"{file}: the records of {problem.dataset!r} are private, and a comparison as a whole is charged to"
            " nobody; compare on public data sets."
        )
    public_of(card, Data(dataset=card.name, transform=problem.transform, encoder=problem.encoder))
    if problem.model not in MODELS and not is_own(problem.model):
        raise ParamsRefusedError(
            f"{file}: there is no model {problem.model!r}; choose one of {', '.join(MODELS)}."
        )


def _features(variant: Variant, file: str) -> dict[str, Any]:
    """The settings of the learned features, complete; empty if there are none."""
    if variant.features in ({}, {"name": "none"}):
        return {}
    return _complete(variant.features, features_from_settings, f"methods.{variant.method}.features", file)


def _complete(
    given: dict[str, Any], make: Callable[[dict[str, Any]], object], key: str, file: str
) -> dict[str, Any]:
    """The settings with every default filled in, so that a changed default changes the cell.

    make: the factory of the object that they are for; the settings of a user's own code stay as they are. key: where
    they are in the file, for messages.
    """
    try:
        made = make(given)
    except RefusedError as refusal:
        raise ParamsRefusedError(f"{file}: {key}.name: {refusal}") from None
    except ValidationError as error:
        raise ParamsRefusedError(f"{file}: {in_words(error.errors()[0], key)}; correct it.") from None
    if is_own(given["name"]):
        return given
    filled: dict[str, Any] = adapter(type(made)).dump_python(made, mode="json")
    return {"name": given["name"]} | filled

"""The cells of a comparison: one run each, known by a digest of all that decides its result."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from algorithms.catalogue import CATALOGUE, from_settings
from algorithms.models import CATALOGUE as MODELS
from algorithms.privacy.errors import Refused
from data import DataCard
from tasks.comparison import Comparison, Problem, Record, Variant, variants
from tasks.params import ParamsRefused

FORMAT = 1
"""Of a cell's result. A change of what is computed or written raises it, and every cell runs again."""
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
class Cell:
    """One run of a comparison.

    card: digest of the data card. settings: of the algorithm, complete, `name` included. epsilon: None for a method
    without noise. seed: of the noise and of the model's start. fold: None for the data's own split.
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

    @property
    def digest(self) -> str:
        """A name for all that decides the result; labels do not."""
        inputs = asdict(self) | {"format": FORMAT}
        for name in ("method", "label", "setting"):
            del inputs[name]
        return digest_of(inputs)

    @property
    def noise_seed(self) -> int:
        """The seed of the noise, different for different cells."""
        return int(self.digest, 16)

    @property
    def is_first(self) -> bool:
        """Whether it is the first of its seeds and folds, whose noise trace is kept."""
        return self.seed == 0 and (self.fold is None or (self.fold.repeat, self.fold.fold) == (0, 0))


Group = tuple[Cell, ...]
"""Cells of one data set, model, method and epsilon, a handful."""


def digest_of(document: object) -> str:
    """A short SHA-256 of a JSON document."""
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:_DIGITS]


def cells(comparison: Comparison, cards: dict[str, DataCard], *, file: str) -> list[Cell]:
    """Every cell, in the order of the file. cards: of each data set. file: its name, for messages.

    Raises ParamsRefused where a data set's records are private, and for an unknown model, algorithm or setting.
    """
    for problem in comparison.problems:
        _check_problem(problem, cards[problem.dataset], file)
    known = [(variant, _resolved(variant, file)) for variant in variants(comparison)]
    digests = {name: digest_of(card.model_dump_json()) for name, card in cards.items()}
    return [
        Cell(
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
            record=_recorded(comparison.record),
        )
        for problem in comparison.problems
        for variant, settings in known
        for epsilon in (variant.epsilons if variant.private else (None,))
        for seed, fold in product(range(comparison.seeds), _folds(comparison))
    ]


def groups(wanted: Sequence[Cell]) -> Iterator[Group]:
    """The cells in groups that share data set, model, method and epsilon, at most 20 in each."""
    together: dict[tuple[Any, ...], list[Cell]] = {}
    for cell in wanted:
        key = (cell.dataset, cell.model, cell.method, cell.setting, cell.epsilon)
        together.setdefault(key, []).append(cell)
    for members in together.values():
        for start in range(0, len(members), _MOST_IN_A_GROUP):
            yield tuple(members[start : start + _MOST_IN_A_GROUP])


def code_digest() -> str:
    """A digest of the algorithms' source code, to tell results of different versions apart."""
    import algorithms

    folder = Path(next(iter(algorithms.__path__)))
    files = sorted(folder.rglob("*.py"))
    return digest_of([[str(file.relative_to(folder)), file.read_text(encoding="utf-8")] for file in files])


def _recorded(record: Record) -> dict[str, Any]:
    document: dict[str, Any] = record.model_dump()
    return document


def _folds(comparison: Comparison) -> Sequence[Fold | None]:
    chosen = comparison.folds
    if chosen is None:
        return [None]
    places = product(range(chosen.repeats), range(chosen.k))
    return [Fold(chosen.k, chosen.seed, repeat, fold) for repeat, fold in places]


def _check_problem(problem: Problem, card: DataCard, file: str) -> None:
    if not card.public:
        raise ParamsRefused(
            f"{file}: the records of {problem.dataset!r} are private, and a comparison as a whole is charged to"
            " nobody; compare on public data sets."
        )
    if problem.model not in MODELS:
        raise ParamsRefused(
            f"{file}: there is no model {problem.model!r}; choose one of {', '.join(MODELS)}."
        )


def _resolved(variant: Variant, file: str) -> dict[str, Any]:
    """The settings with every default filled in, so that a changed default is a changed cell."""
    key = f"methods.{variant.method}.algorithm"
    try:
        algorithm = from_settings(variant.algorithm)
    except Refused as refusal:
        raise ParamsRefused(f"{file}: {key}.name: {refusal}") from None
    except ValidationError as error:
        raise ParamsRefused(f"{file}: {_problem(key, error)}; correct it.") from None
    name = variant.algorithm["name"]
    own: dict[str, Any] = TypeAdapter(CATALOGUE[name]).dump_python(algorithm, mode="json")
    return {"name": name} | own


def _problem(key: str, error: ValidationError) -> str:
    problem: dict[str, Any] = dict(error.errors()[0])
    path = ".".join(map(str, (key, *problem["loc"])))
    if problem["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"unknown setting {path}"
    if problem["type"] in ("missing", "missing_argument"):
        return f"{path} is missing"
    return f"{path} is {problem['input']!r}, but {problem['msg'].replace('Input should', 'it should', 1)}"

"""params.yaml as strict models: unknown keys, wrong types and impossible values are refused with the key's path.

A stage names the groups that it reads; touching another group is an error, so that what a stage reads and what
dvc.yaml lists for it can be compared.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from tasks.groups import (
    GROUPS,
    MODELS,
    OPTIONAL,
    Data,
    Group,
    LedgerPlace,
    Model,
    Performance,
    Privacy,
    Tracking,
)

if TYPE_CHECKING:
    from algorithms.algorithm import Algorithm
    from algorithms.features.features import Features


class ParamsRefused(ValueError):
    """Parameters that cannot be used; the message names the key, what is wrong and what is allowed."""


_Parsed = TypeVar("_Parsed", bound=Group)


@dataclass(frozen=True)
class Params:
    """The groups that a stage reads; any other group raises LookupError."""

    groups: Mapping[str, Any]

    @property
    def data(self) -> Data:
        """Which data set."""
        return self._group("data", Data)

    @property
    def privacy(self) -> Privacy:
        """The target, the accountant and the source of noise."""
        return self._group("privacy", Privacy)

    @property
    def algorithm(self) -> "Algorithm[Any]":
        """The algorithm with its settings, as `algorithms.catalogue.from_settings` made it."""
        algorithm: Algorithm[Any] = self._read("algorithm")[1]
        return algorithm

    @property
    def algorithm_settings(self) -> Mapping[str, Any]:
        """The algorithm's group as params.yaml has it, `name` included."""
        settings: Mapping[str, Any] = self._read("algorithm")[0]
        return settings

    @property
    def features(self) -> "Features | None":
        """What is learned about the features before training; None for nothing."""
        features: Features | None = self._read("features")[1]
        return features

    @property
    def features_settings(self) -> Mapping[str, Any]:
        """The group of the features as params.yaml has it."""
        settings: Mapping[str, Any] = self._read("features")[0]
        return settings

    @property
    def model(self) -> Model:
        """Which model, and the seed of its start."""
        return self._group("model", Model)

    @property
    def performance(self) -> Performance:
        """Settings that never change the result."""
        return self._group("performance", Performance)

    @property
    def tracking(self) -> Tracking:
        """Where Weights & Biases keeps the runs."""
        return self._group("tracking", Tracking)

    @property
    def ledger(self) -> LedgerPlace:
        """Where the ledger is and whose budget is charged."""
        return self._group("ledger", LedgerPlace)

    def _group(self, name: str, kind: type[_Parsed]) -> _Parsed:
        group = self._read(name)
        if not isinstance(group, kind):
            raise TypeError(f"the group {name!r} is no {kind.__name__}")
        return group

    def _read(self, name: str) -> Any:
        if name not in self.groups:
            raise LookupError(
                f"this stage reads the group {name!r}: add it to its READS and to its params in dvc.yaml"
            )
        return self.groups[name]


def load(path: Path, *, reads: tuple[str, ...]) -> Params:
    """The named groups of the params.yaml at `path`; only these are validated.

    Raises ParamsRefused for a file that is no YAML, unknown keys, wrong types and impossible values, and
    algorithms.privacy.errors.Refused for an unknown algorithm.
    """
    try:
        document = YAML(typ="safe", pure=True).load(path)
    except OSError:
        raise ParamsRefused(
            f"There is no file {path}; run this in the folder that holds params.yaml."
        ) from None
    except (YAMLError, UnicodeDecodeError) as error:
        raise ParamsRefused(f"{path.name} is not valid YAML{_line(error)}; correct it.") from None
    return parse(document, reads=reads, name=path.name)


def parse(document: object, *, reads: tuple[str, ...] = GROUPS, name: str = "params.yaml") -> Params:
    """The named groups of a document that is read already; see `load`."""
    if not isinstance(document, Mapping):
        raise ParamsRefused(
            f"{name} must hold the groups {', '.join(GROUPS)}, each with its keys; correct it."
        )
    unknown = [str(key) for key in document if key not in GROUPS]
    if unknown:
        raise ParamsRefused(f"{name}: unknown key {unknown[0]}; the groups are {', '.join(GROUPS)}.")
    return Params({group: _parsed(document, group, name) for group in reads})


def _parsed(document: Mapping[Any, Any], group: str, name: str) -> object:
    values = document.get(group, {} if group in OPTIONAL else None)
    if not isinstance(values, Mapping):
        problem = "is missing" if group not in document else "must be keys with values"
        raise ParamsRefused(f"{name}: the group {group} {problem}; correct it.")
    try:
        if group == "algorithm":
            return values, _algorithm(values)
        if group == "features":
            return values, _features(values)
        return MODELS[group].model_validate(dict(values))
    except ValidationError as error:
        raise ParamsRefused(f"{name}: {_sentence(group, error)}.") from None


def _algorithm(values: Mapping[Any, Any]) -> "Algorithm[Any]":
    if not isinstance(values.get("name"), str):
        raise ParamsRefused("params.yaml: algorithm.name is missing; give the name of an algorithm.")
    from algorithms.catalogue import from_settings  # torch, which takes seconds to import

    return from_settings(dict(values))


def _features(values: Mapping[Any, Any]) -> "Features | None":
    if values.get("name", "none") == "none" and set(values) <= {"name"}:
        return None
    from algorithms.features.catalogue import from_settings  # torch, as above

    return from_settings(dict(values))


def _sentence(group: str, error: ValidationError) -> str:
    return "; ".join(_problem(group, problem) for problem in map(dict, error.errors()))


def _problem(group: str, problem: dict[str, Any]) -> str:
    key = ".".join(map(str, (group, *problem["loc"])))
    if problem["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"unknown key {key}{_known(group)}"
    if problem["type"] in ("missing", "missing_argument"):
        return f"{key} is missing"
    if problem["type"] in ("value_error", "assertion_error"):
        return f"{key}: {problem['msg'].partition(', ')[2]}"
    return f"{key} is {problem['input']!r}, but {problem['msg'].replace('Input should', 'should', 1)}"


def _known(group: str) -> str:
    return f"; the keys of {group} are {', '.join(MODELS[group].model_fields)}" if group in MODELS else ""


def _line(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    return f" near line {mark.line + 1}" if mark else ""

"""The YAML file of a comparison, refused in one sentence that names the key at fault."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from tasks.comparing.comparison import Comparison, Method, delta_of, variants
from tasks.params import ParamsRefused


def load(path: Path) -> Comparison:
    """The comparison that the YAML file at `path` describes.

    Raises ParamsRefused for a file that is no YAML, unknown keys, wrong types and impossible values, and Refused for
    an unknown algorithm; nothing about data sets is looked up yet.
    """
    document = _document(path)
    try:
        comparison = Comparison.model_validate_json(json.dumps(document))
    except ValidationError as error:
        raise ParamsRefused(f"{path.name}: {_problem(document, error)}; correct it.") from None
    if comparison.name != path.stem:
        raise ParamsRefused(f"{path.name}: name must be {path.stem!r}, the name of the file; correct it.")
    _check_once("epsilons", comparison.epsilons, path)
    _check_once("problems", comparison.problems, path)
    # results are told apart by these two
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
            raise ParamsRefused(f"{path.name}: {what} list {value} twice; leave one of them out.")
        kept.append(value)


def _check_delta(key: str, method: Method, comparison: Comparison, path: Path) -> None:
    if method.private and delta_of(method, comparison) == 0 and method.accountant != "pure":
        raise ParamsRefused(
            f"{path.name}: methods.{key}.accountant is {method.accountant}, which needs a delta above 0;"
            " set delta, or the accountant to pure."
        )


def _check_epsilons(key: str, method: Method, comparison: Comparison, path: Path) -> None:
    unknown = sorted(set(method.by_epsilon) - set(method.epsilons or comparison.epsilons))
    if unknown:
        raise ParamsRefused(
            f"{path.name}: methods.{key}.by_epsilon has settings for epsilon {unknown[0]:g}, which is not compared;"
            " leave it out, or add it to the epsilons."
        )


def _document(path: Path) -> dict[str, Any]:
    try:
        document = YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))
        json.dumps(document)
    except OSError:
        raise ParamsRefused(f"There is no file {path}; give the file of a comparison.") from None
    except (YAMLError, UnicodeDecodeError, TypeError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" near line {mark.line + 1}" if mark else ""
        raise ParamsRefused(f"{path.name} is not valid YAML of plain values{where}; correct it.") from None
    if not isinstance(document, dict):
        raise ParamsRefused(f"{path.name} must hold keys with values, such as name and methods; correct it.")
    return document


def _problem(document: Mapping[str, Any], error: ValidationError) -> str:
    problem: dict[str, Any] = dict(error.errors()[0])
    key = ".".join(str(part) for part in problem["loc"] if part != "[key]")
    if problem["type"] == "extra_forbidden":
        return f"unknown key {key}"
    if problem["type"] == "missing":
        return f"{key} is missing"
    if problem["type"] == "value_error":
        return f"{key}: {problem['msg'].partition(', ')[2]}"
    value = problem["input"]
    shown = "not a finite number" if isinstance(value, float) and not math.isfinite(value) else repr(value)
    return f"{key} is {shown}, but {problem['msg'].replace('Input should', 'it should', 1)}"

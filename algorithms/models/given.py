"""What a model is built for, and how its settings are read."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from torch import nn

from algorithms.models.model import ModelRefused

ACTIVATIONS: Mapping[str, type[nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh}


@dataclass(frozen=True)
class Given:
    """Public facts of the data.

    input_shape: of one record. tokens: how many entries a vocabulary has, padding and unknown words included; None
    where features are real numbers. words_sha256: of the file of the words that the entries stand for, one a line, the
    first at entry 2; None where the data do not say it.
    """

    input_shape: tuple[int, ...]
    classes: int
    tokens: int | None = None
    words_sha256: str | None = None


class Settings(BaseModel):
    """The settings of one model; unknown ones and wrong types are refused. Those that end in `_file` are paths."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    def without_files(self) -> dict[str, Any]:
        """Settings that make a model of the same form, of no file: its parameters are then read from elsewhere."""
        return self.model_dump()


_S = TypeVar("_S", bound=Settings)


def settings_of(kind: type[_S], values: Mapping[str, Any], name: str) -> _S:
    """The settings of the model `name`; raises ModelRefused for unknown, missing and impossible ones."""
    try:
        return kind.model_validate(dict(values))
    except ValidationError as error:
        raise ModelRefused(_sentence(name, dict(error.errors()[0]), list(kind.model_fields))) from None


def _sentence(name: str, problem: Mapping[str, Any], known: list[str]) -> str:
    key = ".".join(map(str, problem["loc"]))
    if problem["type"] == "extra_forbidden":
        allowed = f"its settings are {', '.join(known)}" if known else "it has none"
        return f"the model {name!r} has no setting {key!r}; {allowed}."
    if problem["type"] == "value_error":
        return f"the model {name!r}: {problem['msg'].partition(', ')[2]}."
    what = problem["msg"].replace("Input should", "should", 1)
    return f"the setting {key} of the model {name!r} is {problem['input']!r}, but {what}; change it."

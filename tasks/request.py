"""Changes to params.yaml that a person or a deployment asks for: made in the file, so that DVC sees them.

The file keeps its comments. What it would become is checked whole before a byte of it is written.
"""

import io
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import ScalarNode
from ruamel.yaml.representer import RoundTripRepresenter

from data import catalogue
from tasks import params
from tasks.groups import Model
from tasks.params import Params, ParamsRefused
from tasks.recipes import recipe

_RIVALS = (("batch_size", "sampling_rate"), ("norm_noise", "norm_noise_multiplier"))
"""Settings of algorithms for one thing, of which one alone may be given."""


@dataclass(frozen=True)
class Request:
    """What is to change; None leaves a value as it is.

    dataset: also sets the model and the algorithm's settings by its recipe. algorithm: also, for the data set that
    stands. settings: values by dotted key, such as {"algorithm.steps": 100}, made last; of two for one thing,
    such as a batch size and a sampling rate, the one that is named here replaces the other.
    """

    dataset: str | None = None
    algorithm: str | None = None
    epsilon: float | None = None
    delta: float | None = None
    seed: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Revision:
    """params.yaml as it was and as it is to be, and what it then says."""

    path: Path
    before: str
    after: str
    params: Params

    @property
    def changes(self) -> bool:
        """Whether any value differs."""
        return self.after != self.before

    def write(self) -> None:
        """Put the new text in place, whole or not at all."""
        _replace(self.path, self.after)

    def undo(self) -> None:
        """Put the old text back."""
        _replace(self.path, self.before)


def settings_of(assignments: Iterable[str]) -> dict[str, Any]:
    """Dotted keys with their values, from texts such as "privacy.delta=1e-6"; a value is read as YAML.

    Raises ParamsRefused for a text of another form.
    """
    settings = {}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if not equals or not key.strip(" ."):
            raise ParamsRefused(f"--set takes key=value, such as privacy.delta=1e-6, not {assignment!r}.")
        settings[key.strip()] = _value(key, value)
    return settings


def _value(key: str, text: str) -> Any:
    try:
        return YAML(typ="safe", pure=True).load(text)
    except YAMLError:
        raise ParamsRefused(
            f"the value of --set {key} is not valid YAML: {text!r}; put it in quotes."
        ) from None


def revise(root: Path, request: Request) -> Revision:
    """What params.yaml in `root` becomes by `request`; nothing is written.

    Raises ParamsRefused, DataRefused for an unknown data set, and Refused for an unknown algorithm.
    """
    path = root / "params.yaml"
    params.load(path, reads=())
    before = path.read_text(encoding="utf-8")
    document = _yaml().load(before)
    unchanged = _text(document)
    _change(document, request, cards=root / "data" / "cards")
    text = _text(document)
    after = before if text == unchanged else text
    parsed = params.parse(YAML(typ="safe", pure=True).load(after))
    catalogue.card(parsed.data.dataset, root / "data" / "cards")
    return Revision(path, before, after, parsed)


def _change(document: dict[str, Any], request: Request, *, cards: Path) -> None:
    named = {"data.dataset": request.dataset, "privacy.epsilon": request.epsilon}
    named |= {"privacy.delta": request.delta, "model.seed": request.seed}
    wanted = {key: value for key, value in named.items() if value is not None}
    for key, value in wanted.items():
        _set(document, key, value)
    if request.dataset is not None or request.algorithm is not None:
        epsilon = request.settings.get("privacy.epsilon", _get(document, "privacy.epsilon"))
        _follow_recipe(document, request.algorithm, epsilon, cards=cards)
    for key, value in request.settings.items():
        _set(document, key, value)
    _drop_rivals(document, request.settings)


def _drop_rivals(document: dict[str, Any], wanted: Mapping[str, Any]) -> None:
    """Of two settings for one thing, the one that is asked for replaces the one that stands."""
    for pair in _RIVALS:
        for name, other in (pair, pair[::-1]):
            if wanted.get(f"algorithm.{name}") is not None and f"algorithm.{other}" not in wanted:
                document["algorithm"].pop(other, None)


def _follow_recipe(document: dict[str, Any], algorithm: str | None, epsilon: Any, *, cards: Path) -> None:
    """epsilon: that of the run; one that is no positive number is refused when the whole is checked."""
    stands = params.parse(document, reads=("data", "model"))
    name = algorithm or _get(document, "algorithm.name")
    usable = isinstance(epsilon, int | float) and 0 < epsilon < math.inf
    chosen = recipe(catalogue.card(stands.data.dataset, cards), str(name), epsilon if usable else 1.0)
    kept = {key: getattr(stands.model, key) for key in ("seed", "precision")}
    _become(document["model"], Model(name=chosen.model, **kept).model_dump())
    _become(document["algorithm"], {"name": name, **chosen.settings})
    # A recipe is for the records as they are.
    if "transform" in document["data"]:
        _set(document, "data.transform", "none")
    if "features" in document:
        _become(document["features"], {"name": "none"})


def _become(target: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Give a mapping these values in place, so that the comments of the keys that stay stay too."""
    for key in [key for key in target if key not in values]:
        del target[key]
    for key, value in values.items():
        if isinstance(value, Mapping) and value and isinstance(target.get(key), dict):
            _become(target[key], value)
        elif key not in target or target[key] != value:
            target[key] = value


def _get(document: Mapping[str, Any], key: str) -> Any:
    value: Any = document
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _set(document: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key; keys that lead nowhere are made, for the check of the whole to refuse."""
    *parents, last = key.split(".")
    place = document
    for parent in parents:
        inner = place.setdefault(parent, {})
        if not isinstance(inner, dict):
            raise ParamsRefused(f"params.yaml: unknown key {key}; {parent} is a value, not a group of keys.")
        place = inner
    if last not in place or not _same(place[last], value):
        place[last] = value


def _same(one: object, other: object) -> bool:
    return one == other and isinstance(one, bool) == isinstance(other, bool)


class _Representer(RoundTripRepresenter):
    """Writes null where ruamel.yaml would leave the value empty."""

    def represent_none(self, data: Any) -> ScalarNode:
        node: ScalarNode = self.represent_scalar("tag:yaml.org,2002:null", "null")
        return node


_Representer.add_representer(type(None), _Representer.represent_none)


def _yaml() -> YAML:
    yaml = YAML()
    yaml.Representer = _Representer
    yaml.width = 120
    return yaml


def _text(document: object) -> str:
    stream = io.StringIO()
    _yaml().dump(document, stream)
    return stream.getvalue()


def _replace(path: Path, text: str) -> None:
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(path)

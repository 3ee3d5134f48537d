"""Arguments and settings that do not exist: the refusal names the ones that were meant."""

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from typing import Any, get_type_hints

from algorithms.errors import RefusedError

_NAMES_ELSEWHERE = {
    "epochs": "steps",
    "num_epochs": "steps",
    "n_epochs": "steps",
    "max_epochs": "steps",
    "iterations": "steps",
    "batch_size": "expected_batch_size",
    "lot_size": "expected_batch_size",
    "sample_rate": "sampling_rate",
    "max_grad_norm": "clip_norm",
    "l2_norm_clip": "clip_norm",
    "max_norm": "clip_norm",
    "lr": "learning_rate",
    "eps": "epsilon",
    "target_epsilon": "epsilon",
    "target_delta": "delta",
    "group": "people",
    "groups": "people",
    "user_id": "people",
    "user_ids": "people",
    "users": "people",
    "criterion": "loss",
    "labels": "y",
    "target": "y",
    "targets": "y",
    "random_state": "seed",
    "noise_multiplier": "epsilon",
    "sigma": "epsilon",
}
"""What other libraries call the same, or what it follows from."""

_OF_EPOCHS = " (n / expected_batch_size for each epoch)"


class UnknownNameError(RefusedError, TypeError):
    """An argument or a setting that does not exist; the message says which do, and which one was meant."""


def check_names(
    names: Iterable[str], allowed: Iterable[str], *, what: str, kind: str, written: Mapping[str, str]
) -> None:
    """Raises UnknownNameError for a name that is not allowed.

    what: has the names. kind: of name, "setting" or "argument". written: names that exist within others or elsewhere,
    with how they are written.

    Example:
        >>> written = {"learning_rate": "update=OptimizerConfig(learning_rate=...)"}
        >>> check_names(["lr"], ["steps", "update"], what="DPSGD", kind="setting", written=written)
        Traceback (most recent call last):
        algorithms.core.unknown_names.UnknownNameError: DPSGD has no setting 'lr', perhaps
        update=OptimizerConfig(learning_rate=...); its settings are steps, update.
    """
    allowed = list(allowed)
    for name in names:
        if name in allowed:
            continue
        every = dict(written) | {other: other for other in allowed if other not in written}
        meant = _NAMES_ELSEWHERE.get(name, name)
        close = [meant] if meant in every else get_close_matches(name, every, 1, cutoff=0.7)
        perhaps = "".join(
            f", perhaps {every[match]}{_OF_EPOCHS if name.endswith('epochs') else ''}" for match in close
        )
        raise UnknownNameError(
            f"{what} has no {kind} {name!r}{perhaps}; its {kind}s are {', '.join(allowed)}."
        )


def check_settings(kind: type[Any], names: Iterable[str]) -> None:
    """Raises UnknownNameError for a setting that a class of settings does not have."""
    if is_dataclass(kind):
        names, allowed = list(names), [setting.name for setting in fields(kind)]
        if set(names) <= set(allowed):  # as nearly always, and the types below take long to find
            return
        written = {"epsilon": "epsilon of fit, for which the noise is found"} | written_settings(kind)
        check_names(names, allowed, what=kind.__name__, kind="setting", written=written)


def written_settings(kind: type[Any], form: str = "{}") -> dict[str, str]:
    """The settings of a class of settings by name, as they are written; `form` is around each.

    Those of an inner class, as of the optimizer, are among them.
    """
    written: dict[str, str] = {}
    types = _types_of(kind)
    for setting in fields(kind):
        of = types.get(setting.name, setting.type)
        if isinstance(of, type) and is_dataclass(of):
            inner = form.format(f"{setting.name}={of.__name__}({{}})")
            written |= written_settings(of, inner)
    return written | {setting.name: form.format(f"{setting.name}=...") for setting in fields(kind)}


def _types_of(kind: type[Any]) -> dict[str, object]:
    """The types of a class's fields, which may be written as text; empty if a text names what is not there."""
    try:
        return get_type_hints(kind)
    except NameError:
        return {}

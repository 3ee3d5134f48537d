"""Whether the terms of a release as the trace and the card name them are those of its event.

The events are what a cost is computed from; a trace that tells of less noise, or of another sample, tells of another
release. An event has no clip norm of its own: noise is checked as a multiple of the one that is stated.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import dp_accounting as dp

from algorithms.errors import RefusedError
from algorithms.privacy.accounting.events import ObjectivePerturbationDpEvent, PureDpEvent
from algorithms.privacy.mechanisms.noise import GRID_BITS

_ROUNDING = 1e-9
_LARGEST = 1e9
"""The most numbers that a total without a stated dimension is taken to have."""
_STD_AT_SCALE_1 = {"gaussian": 1.0, "laplace": math.sqrt(2.0), "gumbel": math.pi / math.sqrt(6.0)}


@dataclass(frozen=True)
class Between:
    """The least and the most that a number was."""

    least: float
    most: float

    def __contains__(self, number: float) -> bool:
        return self.least * (1 - _ROUNDING) <= number <= self.most * (1 + _ROUNDING)


def fits(event: dp.DpEvent, *, sampling: str, noise: str, rate: Between, multiplier: Between) -> bool:
    """Whether an event can be that of a release of these terms; sampling, noise: in the trace's words."""
    if noise == "nonoise":
        return isinstance(event, dp.NonPrivateDpEvent) and multiplier == Between(0.0, 0.0)
    samples, probability, inner = _sampled(event)
    return sampling in samples and probability in rate and _has_noise(inner, noise, multiplier)


def _sampled(event: dp.DpEvent) -> tuple[tuple[str, ...], float, dp.DpEvent]:
    """The samples an event can be of, in the trace's words, a record's probability, and what is done to the sample."""
    match event:
        case dp.PoissonSampledDpEvent(sampling_probability=rate, event=inner):
            return ("poisson", "importance"), rate, inner
        case dp.SampledWithoutReplacementDpEvent(source_dataset_size=records, sample_size=size, event=inner):
            return ("without replacement",), size / records, inner
    return ("full batch",), 1.0, event


def _has_noise(event: dp.DpEvent, noise: str, multiplier: Between) -> bool:
    """Of pure noise in an objective the event has a bound alone: the curvature is in it, too."""
    match noise, event:
        case "gaussian", dp.GaussianDpEvent(noise_multiplier=z):
            return z in multiplier
        case "laplace", dp.LaplaceDpEvent(noise_multiplier=z):
            return z in multiplier
        case "laplace", dp.dp_event.ZCDpEvent(rho=rho, xi=0.0):
            return math.sqrt(1 / (2 * rho)) in multiplier
        case "gumbel", dp.dp_event.ZCDpEvent(rho=rho, xi=0.0):
            return math.sqrt(1 / (8 * rho)) in multiplier
        case "laplace" | "gumbel" | "knorm", PureDpEvent(epsilon=epsilon):
            return 1 / epsilon in multiplier
        case "objectivenoise", dp.ComposedDpEvent(
            events=[ObjectivePerturbationDpEvent(noise_multiplier=z), dp.GaussianDpEvent()]
        ):
            return z in multiplier
        case "pureobjectivenoise", dp.ComposedDpEvent(events=[PureDpEvent(epsilon=epsilon), PureDpEvent()]):
            return multiplier.most * epsilon >= 1 - _ROUNDING
    return False


def terms_of(event: dp.DpEvent) -> dict[str, Any]:
    """Terms of a release that could be this event, in the trace's words; raises RefusedError where there are none."""
    samples, rate, inner = _sampled(event)
    multipliers: dict[str, float] = {}
    match inner:
        case dp.NonPrivateDpEvent():
            multipliers = {"nonoise": 0.0}
        case dp.GaussianDpEvent(noise_multiplier=z):
            multipliers = {"gaussian": z}
        case dp.LaplaceDpEvent(noise_multiplier=z):
            multipliers = {"laplace": z}
        case dp.dp_event.ZCDpEvent(rho=rho):
            multipliers = {"gumbel": math.sqrt(1 / (8 * rho))}
        case PureDpEvent(epsilon=epsilon):
            multipliers = {"laplace": 1 / epsilon}
        case dp.ComposedDpEvent(events=[ObjectivePerturbationDpEvent(noise_multiplier=z), _]):
            multipliers = {"objectivenoise": z}
        case dp.ComposedDpEvent(events=[PureDpEvent(epsilon=epsilon), _]):
            multipliers = {"pureobjectivenoise": 1 / epsilon}
    for noise, z in multipliers.items():
        if fits(event, sampling=samples[0], noise=noise, rate=Between(rate, rate), multiplier=Between(z, z)):
            return {
                "sampling": samples[0],
                "sampling_rate": rate,
                "noise": noise,
                "noise_multiplier": z,
            }
    raise RefusedError(f"{event} is the event of no release that a card can state; use another method.")


def row_fits(row: Mapping[str, Any], event: dp.DpEvent, *, parameters: int) -> bool:
    """Whether a row of the trace has the sampling and the noise of its event; parameters: of the model."""
    rate, multiplier = (Between(row[name], row[name]) for name in ("sampling_rate", "noise_multiplier"))
    same = fits(event, sampling=row["sampling"], noise=row["noise"], rate=rate, multiplier=multiplier)
    return same and row["noise_std"] in _stds(row, parameters)


def _stds(row: Mapping[str, Any], parameters: int) -> Between:
    """What the standard deviation can be at the row's multiplier and clip norm, with what rounding to a grid adds.

    Of noise in an objective the clip norm is not that of the row, which bounds the result.
    """
    noise, multiplier = row["noise"], row["noise_multiplier"]
    if noise == "nonoise":
        return Between(0.0, 0.0)
    if noise in ("objectivenoise", "pureobjectivenoise"):
        return Between(0.0, math.inf)
    dimension = {"gradient": parameters, "minimum": parameters, "total": _LARGEST}.get(row["kind"], 1)
    least = multiplier * row["clip_norm"] * _std_at_scale_1(row, parameters)
    if row["kind"] == "argmin":
        return Between(least, least)
    steps = math.sqrt(dimension) if noise == "gaussian" else dimension
    return Between(least, least * (1 + steps * multiplier * 2.0**-GRID_BITS))


def _std_at_scale_1(row: Mapping[str, Any], parameters: int) -> float:
    if row["noise"] != "knorm":
        return _STD_AT_SCALE_1[row["noise"]]
    if row["clipping"] == "Box":
        return math.sqrt((parameters + 2) * (parameters + 3) / 6)
    return math.sqrt(parameters + 1)

"""Features that are learned from all records before training, and the registry of their kinds.

Means and second moments are Gaussian releases; the moments follow "Analyze Gauss" (Dwork et al. 2014, Algorithm 1).
"""

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Annotated

import torch
from pydantic import Field, JsonValue
from torch import Tensor, nn
from torch.nn import functional

from algorithms.cell_histograms import CellHistograms
from algorithms.core.learned_features import FeatureLearner
from algorithms.core.optimizers import Positive
from algorithms.core.settings import Strict, from_registry
from algorithms.errors import RefusedError
from algorithms.gradients import L2
from algorithms.models import Model
from algorithms.models.feature_transforms import (
    Centring,
    Preconditioning,
    Projection,
    Shape,
    Standardisation,
    Whitening,
    unit_length,
)
from algorithms.privacy.barrier.barrier import Barrier
from algorithms.privacy.mechanisms.release import Gaussian, Release, total_release
from algorithms.target_scale import TargetScale


@dataclass(frozen=True)
class Standardised(Strict):
    """Normalises the channels of maps [c, h, w] by noisy means and variances ("data normalisation", Tramèr and Boneh
    2021, Section 2.2).

    noise: multiplier of both releases. mean_bound, square_bound: public L2 bounds on a record's channel means and
    channel mean squares.
    """

    noise: Positive = 8.0
    mean_bound: Positive = 1.0
    square_bound: Positive = 1.0

    def releases(self, shape: Shape) -> list[Release]:
        """A sum of channel means, then of channel mean squares.

        Raises RefusedError for records that are no maps.
        """
        if len(shape) != 3:
            raise RefusedError(
                "standardisation takes maps (channels, height, width), not records of shape {shape}; leave"
                " {learned.kind} at none.",
                code="standardise_maps",
                shape=list(shape),
            )
        bounds = (self.mean_bound, self.square_bound)
        return [total_release(L2(bound), Gaussian(self.noise)) for bound in bounds]

    def learn(self, barrier: Barrier, shape: Shape, records: float) -> dict[str, Tensor]:
        """mean, scale: [c, 1, 1]."""
        noise = Gaussian(self.noise)
        mean, square = (  # [c] each
            barrier.total(statistic, bound=L2(bound), noise=noise) / records
            for statistic, bound in (
                (lambda record, _label: record.mean(dim=(1, 2)), self.mean_bound),
                (lambda record, _label: record.square().mean(dim=(1, 2)), self.square_bound),
            )
        )
        variance = (square - mean.square()).clamp(min=0.0) + 1e-5
        return {"mean": mean.float()[:, None, None], "scale": variance.rsqrt().float()[:, None, None]}

    def module(self, shape: Shape) -> Standardisation:
        """The map before learning, which changes nothing."""
        return Standardisation(shape)


@dataclass(frozen=True)
class PrincipalComponents(Strict):
    """Projects on the first principal components of noisy second moments (Dwork et al. 2014; Abadi et al. 2016,
    Section 4).

    components: their number. noise: multiplier of the release. Records are scaled to norm 1 for the second moments, but
    not for the projection. They are not centred, as in the paper.
    """

    components: Annotated[int, Field(ge=1)] = 60
    noise: Positive = 16.0

    def releases(self, shape: Shape) -> list[Release]:
        """A sum of second moments.

        Raises RefusedError for more components than features.
        """
        if self.components > math.prod(shape):
            raise RefusedError(
                "{components} principal components were asked for, of records with {features} features; set"
                " {learned.components} to at most that.",
                code="too_many_components",
                components=self.components,
                features=math.prod(shape),
            )
        return [total_release(L2(1.0), Gaussian(self.noise))]

    def learn(self, barrier: Barrier, shape: Shape, records: float) -> dict[str, Tensor]:
        """components: [features, components], orthonormal."""

        def unit(record: Tensor, _label: Tensor) -> Tensor:
            return functional.normalize(record.flatten(), dim=0)[None]

        moment = barrier.moment(unit, bound=L2(1.0), noise=Gaussian(self.noise))
        vectors = torch.linalg.eigh(moment).eigenvectors  # columns by rising eigenvalue
        return {"components": vectors[:, -self.components :].flip(1).float().contiguous()}

    def module(self, shape: Shape) -> Projection:
        """The map before learning, which keeps the first features."""
        return Projection(shape, components=self.components)


@dataclass(frozen=True)
class Whitened(Strict):
    """Centres maps [c, h, w] by their mean and whitens channels, so that one step size suits all directions.

    groups: of a per-record group normalisation before it, or 0 for none. mean_noise, moment_noise: noise multipliers of
    the two releases. map_norm: L2 bound on a record's map; by default sqrt(c h w), that of a normalised map.
    moment_bound: bound on the Frobenius norm of a record's second moment, averaged over positions; by default c / 4, a
    quarter of a normalised map's. ridge: added to the second moment's eigenvalues, relative to their mean.
    """

    groups: Annotated[int, Field(ge=0)] = 27
    mean_noise: Positive = 30.0
    moment_noise: Positive = 20.0
    map_norm: Positive | None = None
    moment_bound: Positive | None = None
    ridge: Positive = 0.3

    def releases(self, shape: Shape) -> list[Release]:
        """A sum of maps, then a sum of second moments.

        Raises RefusedError for records that are no maps, and for channels that make no such groups.
        """
        if len(shape) != 3 or (self.groups and shape[0] % self.groups):
            raise RefusedError(
                "whitening takes maps (channels, height, width) whose channels make {groups} groups, not"
                " records of shape {shape}; set {records.transform} to scattering, or {learned.groups} to 0.",
                code="whiten_maps",
                groups=self.groups or 1,
                shape=list(shape),
            )
        return [
            total_release(self._map_bound(shape), Gaussian(self.mean_noise)),
            total_release(self._moment_bound(shape), Gaussian(self.moment_noise)),
        ]

    def learn(self, barrier: Barrier, shape: Shape, records: float) -> dict[str, Tensor]:
        """mean: [c, h, w]. matrix: [c, c], the inverse square root of the channels' second moment."""
        positions, normalize = shape[1] * shape[2], self.module(shape).normalize

        def flat(record: Tensor, _label: Tensor) -> Tensor:
            return normalize(record[None])[0].flatten()

        total = barrier.total(flat, bound=self._map_bound(shape), noise=Gaussian(self.mean_noise))
        mean = (total / records).float().view(shape)

        def centre_record(record: Tensor, _label: Tensor) -> Tensor:
            difference = normalize(record[None])[0] - mean.to(record.device)
            # [positions, c]: their moment is a mean over positions
            return difference.flatten(1).T / math.sqrt(positions)

        noise = Gaussian(self.moment_noise)
        moment = barrier.moment(centre_record, bound=self._moment_bound(shape), noise=noise) / records
        values, vectors = torch.linalg.eigh(moment)
        # Noise makes some negative.
        # Noise may leave eigenvalues below 0, and the ridge keeps small ones from being blown up.
        values = values.clamp(min=0.0) + self.ridge * float(values.mean().clamp(min=1e-12))
        return {"mean": mean, "matrix": (vectors @ torch.diag(values.rsqrt()) @ vectors.T).float()}

    def module(self, shape: Shape) -> Whitening:
        """The map before learning, which only normalises."""
        return Whitening(shape, groups=self.groups)

    def _map_bound(self, shape: Shape) -> L2:
        return L2(self.map_norm or math.sqrt(math.prod(shape)))

    def _moment_bound(self, shape: Shape) -> L2:
        return L2(self.moment_bound or shape[0] / 4)


_MAX_FEATURES = 4096
"""The largest number of features for a second moment, which holds about half their square in numbers."""


def _check_moment(shape: Shape) -> None:
    """Raises RefusedError for more features than a second moment can have."""
    if prod(shape) > _MAX_FEATURES:
        raise RefusedError(
            "a second moment of records of shape {shape} was asked for, and at most {most} features can be; set"
            " {learned.kind} to another, or for centred leave {learned.moment_noise} out.",
            code="too_many_for_moment",
            shape=list(shape),
            most=_MAX_FEATURES,
        )


@dataclass(frozen=True)
class Preconditioned(Strict):
    """Multiplies records of unit length by the inverse square root of a noisy second moment.

    For linear models: their loss is then about as steep in all directions, so that one step size suits all, as if each
    step were one of Newton's method with a Hessian that is released once (a preconditioner). Records are flattened and
    scaled to unit length first, so the moment has a sensitivity of 1.

    The eigenvalues of the noise alone reach 2 e for e = noise sqrt(d) / n. Those of the release are made smaller by e,
    and e / 2 is added to what is left: directions that cannot be told from noise are hardly amplified.

    noise: multiplier of the release. length: mean length of a mapped record, as far as the release shows it.
    """

    noise: Positive = 20.0
    length: Positive = 4.0

    def releases(self, shape: Shape) -> list[Release]:
        """A sum of second moments."""
        _check_moment(shape)
        return [total_release(L2(1.0), Gaussian(self.noise))]

    def learn(self, barrier: Barrier, shape: Shape, records: float) -> dict[str, Tensor]:
        """matrix: [d, d], symmetric."""
        features = prod(shape)
        moment = barrier.moment(
            lambda record, _label: unit_length(record[None]), bound=L2(1.0), noise=Gaussian(self.noise)
        )
        values, vectors = torch.linalg.eigh(moment / records)  # moment / n = V diag(values) V^T
        of_noise = self.noise * math.sqrt(features) / records
        values = (values - of_noise).clamp(min=0.0)
        raised = values + of_noise / 2.0
        # The second moment of unit records has trace 1. What was cut off is taken to lie in all directions alike.
        shown = values / values.sum().clamp(min=1.0)
        likely = shown + (1.0 - shown.sum()) / features
        length = (likely / raised).sum().sqrt()  # root mean square of |matrix x| with a factor of 1
        matrix = vectors @ torch.diag(self.length / length * raised.rsqrt()) @ vectors.T
        return {"matrix": matrix.float()}

    def module(self, shape: Shape) -> Preconditioning:
        """The map before learning, which scales records to unit length."""
        return Preconditioning(shape)


@dataclass(frozen=True)
class Centred(Strict):
    """Centres flattened records of unit length by a noisy mean and whitens them by a noisy second moment.

    For the features of a frozen encoder. Each record is first scaled to unit length, so that mean and moment have a
    sensitivity of 1. A mean that is shorter than its noise is drawn to 0, so that few records are not moved by noise.

    mean_noise, moment_noise: noise multipliers of the two releases; without moment_noise there is no whitening. power:
    of the inverse second moment, 0.5 for full whitening. ridge: added to the moment's eigenvalues, relative to the
    largest. head_noise: noise multiplier of class sums of the linear head's inputs, scaled to unit length, at
    which the head starts; without it the head keeps the model's own start. head_length: mean length of the rows of such
    a start.
    """

    mean_noise: Positive = 40.0
    moment_noise: Positive | None = None
    power: Annotated[float, Field(gt=0, le=0.5)] = 0.25
    ridge: Positive = 0.01
    head_noise: Positive | None = None
    head_length: Positive = 10.0

    def releases(self, shape: Shape) -> list[Release]:
        """A sum of records; with their noise, a sum of second moments, and class sums."""
        if self.moment_noise is not None:
            _check_moment(shape)
        noises = (self.mean_noise, self.moment_noise, self.head_noise)
        return [total_release(L2(1.0), Gaussian(noise)) for noise in noises if noise is not None]

    def learn(self, barrier: Barrier, shape: Shape, records: float) -> dict[str, Tensor]:
        """mean: [d]. matrix: [d, d], the second moment raised to the power -`power`."""
        total = barrier.total(
            lambda record, _label: unit_length(record[None])[0],
            bound=L2(1.0),
            noise=Gaussian(self.mean_noise),
        )
        mean = (_less_noisy(total, self.mean_noise) / records).float()
        if self.moment_noise is None:
            return {"mean": mean}

        def centre_record(record: Tensor, _label: Tensor) -> Tensor:
            return unit_length(record[None]) - mean.to(record.device)

        moment = barrier.moment(centre_record, bound=L2(1.0), noise=Gaussian(self.moment_noise)) / records
        values, vectors = torch.linalg.eigh(moment)
        values = values.clamp(min=0.0) + self.ridge * float(values.max().clamp(min=1e-12))
        matrix = vectors @ torch.diag(values**-self.power) @ vectors.T
        return {"mean": mean, "matrix": matrix.float()}

    def check(self, model: Model) -> None:
        """Raises RefusedError if class sums are requested but the model is not a single linear head."""
        if self.head_noise is not None:
            _head_of(model)

    def start(self, barrier: Barrier, model: Model) -> Tensor:
        """The model's initial parameters, [parameters], given the learned map."""
        parameters = model.initial_parameters()
        if self.head_noise is None:
            return parameters
        name, rows = _head_of(model)
        before = copy.deepcopy(model.module)
        before.set_submodule(name.rpartition(".")[0], nn.Identity())

        def of_its_class(record: Tensor, label: Tensor) -> Tensor:
            unit = unit_length(before.to(record.device)(record[None]))
            every = torch.arange(rows, device=record.device)  # [rows]
            # One row of a record is not zero, so its norm is 1: its class's, or the only logit's, by +1 or -1.
            signs = (label == every) if rows > 1 else 2 * label[None] - 1
            directions: Tensor = signs.to(unit.dtype)[:, None] * unit  # [rows, features]
            return directions.reshape(-1)

        sums = barrier.total(of_its_class, bound=L2(1.0), noise=Gaussian(self.head_noise)).float()
        length = torch.linalg.vector_norm(sums) / rows**0.5  # root mean square norm of the rows
        parameters[model.slices[name]] = self.head_length * sums / length.clamp(min=1e-6)
        return parameters

    def module(self, shape: Shape) -> Centring:
        """The map before learning, which scales records to unit length."""
        return Centring(shape, whitens=self.moment_noise is not None)


def _less_noisy(total: Tensor, noise_std: float) -> Tensor:
    """A noisy sum drawn to 0 by as much as noise alone would make it long (the positive part of James and Stein 1961).

    Of few records the noise in hundreds of features is longer than their mean, and all records less that noise, scaled
    to unit length again, would be nearly the same.
    """
    by_noise = max(0, len(total) - 2) * noise_std**2
    return total * max(0.0, 1.0 - by_noise / max(float(total.square().sum()), noise_std**2))


def _head_of(model: Model) -> tuple[str, int]:
    """The name of a linear head's only matrix, and its number of rows."""
    matrices = [name for name, shape in model.shapes.items() if len(shape) == 2]
    others = [name for name, shape in model.shapes.items() if len(shape) > 2]
    if len(matrices) != 1 or others or model.label_shape or model.label_dtype != torch.int64:
        raise RefusedError(
            "{learned.head_noise} starts a linear head at the sums of classes, and the model {model!r} is no"
            " such head; choose unit_linear, softmax or logistic, or leave head_noise out.",
            code="head_not_linear",
            model=model.name,
        )
    return matrices[0], model.shapes[matrices[0]][0]


FEATURES: dict[str, type[FeatureLearner]] = {
    "whitened": Whitened,
    "principal_components": PrincipalComponents,
    "standardised": Standardised,
    "centred": Centred,
    "preconditioned": Preconditioned,
    "target_scale": TargetScale,
    "histograms": CellHistograms,
}


def from_settings(settings: Mapping[str, JsonValue]) -> FeatureLearner:
    """The features that `settings` name under "name", with the other keys as their settings; see `from_registry`."""
    return from_registry(settings, FEATURES, "kind of features", needs=("releases", "learn", "module"))

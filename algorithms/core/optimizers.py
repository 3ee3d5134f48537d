"""Optimizers for released gradients: learning-rate schedules, momentum, Adam, weight decay, iterate averaging.

All of this is post-processing of releases and public numbers, and costs no privacy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field

from algorithms.core.unknown_names import check_settings
from algorithms.lazy_imports import lazy_module

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = lazy_module("torch")

STRICT = ConfigDict(extra="forbid", strict=True)
Count = Annotated[int, Field(ge=1)]
MAX_STEPS = 1_000_000
StepCount = Annotated[int, Field(ge=1, le=MAX_STEPS)]
"""More take minutes to plan."""
Positive = Annotated[float, Field(gt=0, lt=math.inf)]
NotNegative = Annotated[float, Field(ge=0, lt=math.inf)]
Share = Annotated[float, Field(gt=0, le=1)]
Bound = Annotated[float, Field(ge=1e-12, le=1e12)]
"""A bound on a record's gradient or loss."""

# The functions under torch.optim's classes: they take all of their state, so a checkpoint can hold it, and a first
# optimizer of a process takes seconds to make. PyTorch's default on an accelerator, `foreach`, does not take a whole
# number as the count of steps.
_SGD: dict[str, Any] = {"foreach": False, "dampening": 0.0, "weight_decay": 0.0, "maximize": False}
_ADAM: dict[str, Any] = {
    "foreach": False,
    "eps": 1e-8,
    "weight_decay": 0.0,
    "amsgrad": False,
    "maximize": False,
}


@dataclass(frozen=True)
class OptimizerState:
    """What the optimizer keeps between steps.

    Attributes:
        parameters: [d], the point of the next gradient.
        first, second: [d], momentum, and for "adam" the mean of squared gradients.
        average: [d], of parameters, if the settings ask for one.
        count: [], the number of steps taken.
    """

    parameters: Tensor
    first: Tensor
    second: Tensor
    average: Tensor
    count: Tensor


@dataclass(frozen=True)
class OptimizerConfig:
    """Settings of the update.

    learning_rate: of the first step. momentum: of "sgd", or beta1 of "adam". second_momentum: beta2 of "adam".
    optimizer: "sgd" with heavy-ball momentum (v <- momentum v + g; Polyak 1964), or "adam" (Kingma and Ba 2015).
    schedule: how the learning rate falls to 0 at the last step; "constant" keeps it.
    averaging: what is published: the last iterate ("none"), an exponential state average whose time constant is a
    tenth of the steps ("ema"), or the mean of the last quarter ("tail").
    weight_decay: decoupled, multiplied with the learning rate (Loshchilov and Hutter 2019).
    noise_limit: the largest standard deviation that the noise of all steps together may give a parameter; a higher
    learning rate is lowered to that, by the plan's noise and the batch that sums are divided by. For "sgd" alone.
    nesterov: the momentum of "sgd" looks ahead, the step being along g + momentum v (Nesterov 1983), which damps
    oscillations where the loss is steep.
    """

    learning_rate: Positive = 1.0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    optimizer: Literal["sgd", "adam"] = "sgd"
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    second_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.999
    averaging: Literal["none", "ema", "tail"] = "none"
    weight_decay: NotNegative = 0.0
    noise_limit: Positive | None = None
    nesterov: bool = False

    __pydantic_config__ = STRICT

    def __new__(cls, *_: Any, **settings: Any) -> Self:
        """Raises UnknownNameError for a setting that does not exist, as `lr`."""
        check_settings(cls, settings)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if self.noise_limit is not None and self.optimizer != "sgd":
            raise ValueError("noise_limit is for the optimizer sgd; leave it out, or choose sgd")
        if self.nesterov and (self.optimizer != "sgd" or self.momentum == 0.0):
            raise ValueError(
                "nesterov needs the optimizer sgd with a momentum above 0; leave it out, or set them"
            )

    def factor_for(self, noise_std: float, steps: int) -> float:
        """What the learning rate is multiplied with to keep to `noise_limit`, at most 1.

        noise_std: of the noise in each coordinate of each of `steps` gradients. The noise of a step moves a parameter
        by 1 / (1 - momentum) times its learning rate in the end, were there no gradients.

        Example:
            >>> limited = OptimizerConfig(learning_rate=4.0, momentum=0.5, noise_limit=0.8)
            >>> limited.factor_for(noise_std=0.1, steps=4)  # 4 / (1 - 0.5) * 0.1 * sqrt(4) is 1.6
            0.5
        """
        if self.noise_limit is None or noise_std == 0.0:
            return 1.0
        return min(1.0, self.noise_limit / self.noise_moves(noise_std, steps))

    def noise_moves(self, noise_std: float, steps: int) -> float:
        """The standard deviation by which noise moves a parameter in the end; arguments as of `factor_for`."""
        # Independent noise of each step: variances add up, each times the square of that step's learning rate.
        squares = math.fsum(self._decay(step / steps) ** 2 for step in range(steps))
        return self.learning_rate / (1.0 - self.momentum) * noise_std * math.sqrt(squares)

    def moves(self, steps: int) -> list[float]:
        """How far a gradient of 1 in each of `steps` steps moves a parameter in the end, were there no others; "sgd".

        Example:
            >>> OptimizerConfig(learning_rate=0.5, momentum=0.75, schedule="linear").moves(steps=2)
            [2.0, 1.0]
        """
        # Heavy ball: a gradient comes back with the weights 1, m, m^2, .., whose sum is 1 / (1 - m).
        return [self.rate_at(step / steps) / (1.0 - self.momentum) for step in range(steps)]

    def limited_moves(self, noises: Sequence[float]) -> list[float]:
        """The same where `noise_limit` shortens steps: by the noise's standard deviation in each step's gradient.

        Where the clip norm falls, steps with less noise are as much longer as the limit allows.

        Example:
            >>> limited = OptimizerConfig(learning_rate=4.0, momentum=0.5, noise_limit=0.8)
            >>> limited.limited_moves([0.1, 0.1, 0.05, 0.05])
            [4.0, 4.0, 8.0, 8.0]
        """
        factors = {noise: self.factor_for(noise, len(noises)) for noise in set(noises)}  # few, for many steps
        return [factors[noise] * move for noise, move in zip(noises, self.moves(len(noises)), strict=True)]

    def start(self, parameters: Tensor) -> OptimizerState:
        """The state before the first step."""
        zeros = torch.zeros_like(parameters)
        return OptimizerState(parameters.clone(), zeros, zeros.clone(), parameters.clone(), torch.tensor(0))

    def apply(
        self, state: OptimizerState, gradient: Tensor, *, steps: int, factor: float = 1.0
    ) -> OptimizerState:
        """One of `steps` steps along a released gradient.

        Args:
            state: Before the step; it is not changed.
            gradient: Shape [d], on the device of the state.
            steps: Of the whole run, which the schedule and the averaging follow.
            factor: For the learning rate, from algorithms with a schedule of their own.

        Returns:
            The state after the step.

        Example:
            >>> config = OptimizerConfig(learning_rate=0.5, schedule="linear")
            >>> config.apply(config.start(torch.zeros(2)), torch.tensor([1.0, -2.0]), steps=10).parameters
            tensor([-0.5000,  1.0000])
        """
        from torch.optim.adam import adam
        from torch.optim.sgd import sgd

        rate = self.learning_rate * factor * self._decay(int(state.count) / steps)
        # Decoupled: decay acts on parameters and not through the gradient, which momentum and Adam would rescale. The
        # product is a new tensor, and the others are copied, since PyTorch's functions write into what they get.
        parameters = state.parameters * (1 - rate * self.weight_decay)
        first, second, count = state.first.clone(), state.second.clone(), state.count.clone()
        if self.optimizer == "sgd":
            how: dict[str, Any] = {"lr": rate, "momentum": self.momentum, "nesterov": self.nesterov}
            sgd([parameters], [gradient], [first], **how, **_SGD)
            count += 1  # which `adam` does by itself
        else:
            how = {"lr": rate, "beta1": self.momentum, "beta2": self.second_momentum}
            # The empty list would hold the largest squares of AMSGrad.
            adam([parameters], [gradient], [first], [second], [], [count], **how, **_ADAM)
        average = state.average
        if self.averaging != "none":
            # A running mean: with the weight 1 / k it is that of the last k iterates.
            average = average + self.averaging_weight(int(count), steps) * (parameters - average)
        return OptimizerState(parameters, first, second, average, count)

    def published_parameters(self, state: OptimizerState) -> Tensor:
        """The parameters to publish, shape [d]."""
        return state.parameters if self.averaging == "none" else state.average

    def rate_at(self, progress: float) -> float:
        """The learning rate after this share of the steps."""
        return self.learning_rate * self._decay(progress)

    def averaging_weight(self, count: int, steps: int) -> float:
        """The weight of the parameters in the average that is published after `count` of `steps` steps.

        Example:
            >>> [OptimizerConfig(averaging="tail").averaging_weight(count, 8) for count in (1, 6, 7, 8)]
            [1.0, 1.0, 1.0, 0.5]
        """
        match self.averaging:
            case "none":
                return 1.0
            case "ema":
                return min(1.0, max(1.0 / count, 10.0 / steps))  # a mean at first, then 10 / steps
            case "tail":
                # The first three quarters are replaced, the last is averaged.
                return 1.0 / max(1, count - (3 * steps) // 4)

    def _decay(self, progress: float) -> float:
        match self.schedule:
            case "constant":
                return 1.0
            case "linear":
                return 1.0 - progress
            case "cosine":
                return 0.5 * (1.0 + math.cos(math.pi * progress))

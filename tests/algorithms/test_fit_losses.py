"""Losses of torch.nn: a plain step through `fit` is PyTorch's own, for each of their reductions, or is refused."""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import loss as losses_of_torch

from algorithms import NonPrivate, OptimizerConfig, fit
from algorithms.errors import RefusedError
from algorithms.fit_model import model_of
from algorithms.fit_records import records_of
from tests.support.costs import costs_once
from tests.support.engines import engines_once
from tests.support.refusals import refused
from tests.support.soak import soak_but

__all__ = ["costs_once", "engines_once"]

N, K, RATE = 6, 3, 0.5
DRAW = np.random.default_rng(3)
X = DRAW.normal(size=(N, 5)).astype(np.float32)

CLASSES = np.array([0, 1, 2, 2, 1, 0])
PIXELS = DRAW.integers(0, K, (N, 2, 2))
SIGNS = np.where(DRAW.random((N, K)) < 0.5, -1.0, 1.0)
REAL = DRAW.normal(size=(N, K))
SHARES = DRAW.dirichlet(np.ones(K), N)
MARKS = DRAW.integers(0, 2, (N, K))
SETS = np.array([[0, -1, -1], [2, 1, -1], [1, -1, -1], [0, 1, 2], [2, -1, -1], [1, 0, -1]])
WEIGHT = torch.tensor([1.0, 3.0, 0.5])
MEAN, SUM, NONE, BATCH_MEAN = "mean", "sum", "none", "batchmean"
ALL = (MEAN, SUM, NONE)


@dataclass(frozen=True)
class Case:
    """outputs: of a record. after: the model's last layer. mixing: reductions that are refused, as they mix records.

    All reductions are tried with the first case of each loss, and with those that say so.
    """

    y: Any
    outputs: tuple[int, ...] = (K,)
    after: Callable[[], nn.Module] = nn.Identity
    reductions: tuple[str, ...] = (MEAN,)
    mixing: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)


CASES: dict[str, list[Case]] = {
    "L1Loss": [Case(REAL), Case(REAL[:, 0], (1,)), Case(REAL[:, :1], (1,))],
    "MSELoss": [Case(REAL), Case(REAL[:, 0], (1,)), Case(CLASSES, (1,))],
    "SmoothL1Loss": [Case(REAL, settings={"beta": 0.5})],
    "HuberLoss": [Case(REAL, settings={"delta": 0.5}), Case(DRAW.normal(size=(N, 2, 2)), (2, 2))],
    "PoissonNLLLoss": [Case(MARKS, settings={"full": True}), Case(np.abs(REAL))],
    "HingeEmbeddingLoss": [Case(SIGNS), Case(SIGNS.astype(int))],
    "SoftMarginLoss": [Case(SIGNS), Case(SIGNS[:, 0].astype(int), (1,))],
    "KLDivLoss": [
        Case(SHARES, after=lambda: nn.LogSoftmax(1), reductions=(MEAN, BATCH_MEAN)),
        Case(
            np.log(SHARES),
            after=lambda: nn.LogSoftmax(1),
            reductions=(MEAN, BATCH_MEAN),
            settings={"log_target": True},
        ),
        Case(SHARES.reshape(N, 1, K), (1, K), after=lambda: nn.LogSoftmax(-1), reductions=(MEAN, BATCH_MEAN)),
    ],
    "BCELoss": [
        Case(MARKS, after=nn.Sigmoid),
        Case(MARKS[:, 0], (1,), after=nn.Sigmoid),
        Case(MARKS, after=nn.Sigmoid, settings={"weight": WEIGHT}),
    ],
    "BCEWithLogitsLoss": [
        Case(MARKS),
        Case(MARKS[:, 0], (1,)),
        Case(SHARES, settings={"weight": WEIGHT, "pos_weight": WEIGHT}),
    ],
    "MultiLabelMarginLoss": [Case(SETS)],
    "MultiLabelSoftMarginLoss": [Case(MARKS), Case(MARKS, settings={"weight": WEIGHT})],
    "MultiMarginLoss": [Case(CLASSES), Case(CLASSES, settings={"p": 2, "margin": 0.5, "weight": WEIGHT})],
    "NLLLoss": [
        Case(CLASSES, after=lambda: nn.LogSoftmax(1)),
        Case(CLASSES, reductions=ALL, settings={"weight": WEIGHT}, mixing=(MEAN,)),
        Case(PIXELS, (K, 2, 2), after=lambda: nn.LogSoftmax(1)),
        Case(CLASSES, settings={"ignore_index": 1}, mixing=(MEAN,)),
    ],
    "CrossEntropyLoss": [
        Case(CLASSES),
        Case(PIXELS, (K, 2, 2)),
        Case(PIXELS[:, 0], (2, K)),
        Case(SHARES, settings={"label_smoothing": 0.1}),
        Case(CLASSES, settings={"label_smoothing": 0.1}),
        Case(CLASSES, reductions=ALL, settings={"weight": WEIGHT}, mixing=(MEAN,)),
        Case(PIXELS, (K, 2, 2), settings={"weight": WEIGHT, "label_smoothing": 0.1}, mixing=(MEAN,)),
        Case(SHARES, settings={"weight": WEIGHT}),
        Case(CLASSES, settings={"ignore_index": 1}, mixing=(MEAN,)),
        # As many targets of each record count, so that PyTorch's mean over all of them is one over the records.
        Case(
            np.where(np.arange(4) == CLASSES[:, None], -100, PIXELS.reshape(N, 4)),
            (K, 4),
            reductions=(MEAN, SUM),
        ),
        Case(
            np.where(np.arange(4) == CLASSES[:, None], 1, 2 - 2 * (PIXELS.reshape(N, 4) % 2)),
            (4, K),
            reductions=(MEAN, SUM),
            settings={"ignore_index": 1},
        ),
    ],
}
CASES["NLLLoss2d"] = [Case(PIXELS, (K, 2, 2), after=lambda: nn.LogSoftmax(1))]

OF_MORE_INPUTS = {
    "GaussianNLLLoss": "input, target, var",
    "CosineEmbeddingLoss": "input1, input2, target",
    "MarginRankingLoss": "input1, input2, target",
    "TripletMarginLoss": "anchor, positive, negative",
    "TripletMarginWithDistanceLoss": "anchor, positive, negative",
    "CTCLoss": "log_probs, targets, input_lengths, target_lengths",
}
WITH_PARAMETERS = {"LinearCrossEntropyLoss"}

EVERY = [
    (name, place, reduction)
    for name, cases in CASES.items()
    for place, case in enumerate(cases)
    for reduction in sorted({*case.reductions, *(ALL if place == 0 else ())})
]
IN_SUITE = [
    (name, place, reduction)
    for name, place, reduction in EVERY
    if place or reduction in (MEAN, *CASES[name][0].reductions, (SUM, NONE)[list(CASES).index(name) % 2])
]
"""Of the first case of a loss the mean and one of the others, which one code divides for all losses."""


def model(case: Case) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        layers = nn.Linear(5, math.prod(case.outputs)), nn.Unflatten(1, case.outputs), case.after()
        return nn.Sequential(*layers)


def step(module: nn.Module, loss: Any, y: Any) -> list[Tensor]:
    """What a step over all records moves the parameters by, without noise, clipping and learning rate."""
    method = NonPrivate(steps=1, expected_batch_size=N, update=OptimizerConfig(learning_rate=RATE))
    how: Any = {"method": method, "epsilon": 1, "delta": 1e-3, "public": True, "noise": "seeded"}
    trained = fit(module, loss, X, y, **how).model
    pairs = zip(module.parameters(), trained.parameters(), strict=True)
    return [(before - after).detach() / RATE for before, after in pairs]


def by_its_losses(module: nn.Module, loss: Any, y: Any) -> list[Tensor]:
    """The gradient of the mean of the losses that `fit` takes for the records, without a run."""
    model, _, given = model_of(module, loss, records_of(module, X, y, loss))
    records = torch.from_numpy(given.features), torch.from_numpy(given.labels)
    parameters = [part.requires_grad_() for part in model.module.parameters()]
    return list(torch.autograd.grad(model.losses(model.module(records[0]), records[1]).mean(), parameters))


def gradients(module: nn.Module, loss: nn.Module, case: Case, reduction: str) -> list[Tensor]:
    """PyTorch's own; a sum is divided by the number of records, as a method does."""
    outputs, y = module(torch.from_numpy(X)), torch.from_numpy(np.asarray(case.y))
    takes_numbers = y.is_floating_point() or not isinstance(
        loss, nn.CrossEntropyLoss | nn.NLLLoss | nn.MultiMarginLoss | nn.MultiLabelMarginLoss
    )
    if takes_numbers:
        y = y.float()
        outputs = outputs.flatten(0) if y.dim() == 1 else outputs
    elif case.outputs[-1] == K and len(case.outputs) == 2:
        outputs = outputs.movedim(-1, 1)
    value = loss(outputs, y)
    if reduction == SUM:
        value = value / N
    if reduction == NONE:
        value = value.flatten(1).mean(1) if value.dim() > 1 else value
        value = value.mean()
    return list(torch.autograd.grad(value, list(module.parameters())))


def test_every_loss_of_torch_is_in_the_tables() -> None:
    kinds = {
        name
        for name, kind in vars(losses_of_torch).items()
        if isinstance(kind, type) and issubclass(kind, losses_of_torch._Loss) and not name.startswith("_")
    }
    assert len(kinds) > 20
    assert kinds == {*CASES, *OF_MORE_INPUTS, *WITH_PARAMETERS}


@pytest.mark.filterwarnings(
    "ignore:reduction. 'mean' divides:UserWarning", "ignore:.*NLLLoss2d:FutureWarning"
)
@pytest.mark.parametrize(("name", "place", "reduction"), soak_but(IN_SUITE, EVERY))
def test_a_plain_step_is_that_of_torch_or_is_refused(name: str, place: int, reduction: str) -> None:
    """By a run for the mean over the first case of each loss; for the others by what a run takes the gradient of."""
    case = CASES[name][place]
    loss = getattr(losses_of_torch, name)(reduction=reduction, **case.settings)
    module = model(case)
    moved_by = step if (place, reduction) == (0, MEAN) else by_its_losses
    if reduction in case.mixing:
        with refused("divides by what the records of a batch hold together.*reduction='none'"):
            moved_by(module, loss, case.y)
        return
    pairs = zip(moved_by(module, loss, case.y), gradients(module, loss, case, reduction), strict=True)
    for moved, expected in pairs:
        assert float(expected.norm()) > 1e-3
        torch.testing.assert_close(moved, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", OF_MORE_INPUTS)
def test_a_loss_of_more_than_outputs_and_targets_is_refused(name: str) -> None:
    words = f"the loss takes {OF_MORE_INPUTS[name]}, and it is called with outputs and targets alone"
    with refused(words):
        step(model(Case(REAL)), getattr(nn, name)(), REAL)
    function = {"GaussianNLLLoss": functional.gaussian_nll_loss, "CTCLoss": functional.ctc_loss}.get(name)
    if function is not None:
        with refused("called with outputs and targets alone"):
            step(model(Case(REAL)), function, REAL)


@pytest.mark.parametrize(
    ("kind", "reduction", "words"),
    [
        (nn.KLDivLoss, "median", "has the reduction 'median'; give it one of none, mean, sum, batchmean"),
        (nn.MSELoss, BATCH_MEAN, "has the reduction 'batchmean'; give it one of none, mean, sum"),
    ],
)
def test_a_reduction_that_is_unknown_is_refused(kind: type[nn.Module], reduction: str, words: str) -> None:
    loss = kind()
    loss.reduction = reduction  # type: ignore[assignment]
    with refused(words):
        step(model(Case(REAL)), loss, REAL)


class Own(nn.Module):
    """A loss of one's own, whose mean is over the batch of sums over outputs."""

    def __init__(self, reduction: str = MEAN) -> None:
        super().__init__()
        self.reduction = reduction

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        each = (outputs - targets).square()
        return each if self.reduction == NONE else each.sum(1).mean()


def test_a_reduction_of_ones_own_that_is_not_by_record_is_refused() -> None:
    with pytest.raises(RefusedError, match="divides by what the records"):
        step(model(Case(REAL)), Own(), REAL)


def gaussian(outputs: Tensor, targets: Tensor) -> Tensor:
    variances = outputs[:, 1].exp()
    return functional.gaussian_nll_loss(outputs[:, 0], targets, variances, reduction="none")


def by_hand(outputs: Tensor, targets: Tensor) -> Tensor:
    return 0.5 * (outputs[:, 1] + (outputs[:, 0] - targets).square() / outputs[:, 1].exp())


def as_module(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.GaussianNLLLoss(reduction="none")(outputs[:, 0], targets, outputs[:, 1].exp())  # type: ignore


def as_distribution(outputs: Tensor, targets: Tensor) -> Tensor:
    normal = torch.distributions.Normal(outputs[:, 0], (0.5 * outputs[:, 1]).exp())
    return -normal.log_prob(targets) - 0.5 * math.log(2 * math.pi)


@pytest.mark.parametrize("loss", [gaussian, as_module, as_distribution])
def test_a_loss_that_checks_values_is_computed_for_all_records_at_once(
    loss: Any, caplog: pytest.LogCaptureFixture
) -> None:
    case = Case(REAL[:, 0], (2,))
    with caplog.at_level(logging.WARNING, logger="algorithms"):
        moved = step(model(case), loss, case.y)
    assert not caplog.records  # which would say "record by record"
    for own, expected in zip(moved, step(model(case), by_hand, case.y), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("full_inspections")
@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (
            lambda o, t: -torch.distributions.Normal(o[:, 0], 1.0, validate_args=True).log_prob(t),
            "a distribution checks its arguments.*validate_args=False",
        ),
        (
            lambda o, t: functional.binary_cross_entropy(o[:, 0].sigmoid(), t.sigmoid(), reduction="none"),
            r"binary_cross_entropy_with_logits.*without a sigmoid",
        ),
        (
            lambda o, t: functional.gaussian_nll_loss(o[:, 0], t, o[:, 1], reduction="none"),
            r"a variance has to be above 0; make it so, as by \.exp\(\)",
        ),
    ],
)
def test_a_check_of_values_that_stays_is_named_with_what_turns_it_off(loss: Any, words: str) -> None:
    case = Case(REAL[:, 0], (2,))
    with refused(words):
        step(model(case), loss, case.y)


def test_a_loss_beyond_its_targets_bounds_is_named_in_place_of_the_model(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def beta(outputs: Tensor, targets: Tensor) -> Tensor:
        first, second = functional.softplus(outputs).add(0.01).unbind(1)
        return -torch.distributions.Beta(first, second).log_prob(targets)

    case = Case(SHARES[:, 0].clip(0.1, 0.9), (2,))
    with caplog.at_level(logging.WARNING, logger="algorithms"):
        step(model(case), beta, case.y)
        assert "targets.clamp(low, high) in the loss" in caplog.text
        caplog.clear()
        step(model(case), lambda outputs, targets: beta(outputs, targets.clamp(0.01, 0.99)), case.y)
    assert not caplog.records  # as the log advised

"""What an examination lets through: models with dropout, and gradients that are small or nothing at the start."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

from algorithms.gradients import L2
from tests.algorithms.gradients import naive
from tests.algorithms.gradients.zoo import Spec, Wired, problem, rows, zero_start

DROPPING = {
    "dropout": Spec(lambda: nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2)), (4,)),
    "channels": Spec(
        lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.Dropout2d(0.5), nn.Flatten(), nn.Linear(36, 2)),
        (1, 5, 5),
    ),
    "lstm": Spec(
        lambda: Wired(
            lambda self, x: self.layer(x)[0], layer=nn.LSTM(3, 4, 2, dropout=0.5, batch_first=True)
        ),
        (5, 3),
    ),
    "transformer": Spec(lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.5, batch_first=True), (5, 4)),
    "attention with weights": Spec(
        lambda: Wired(
            lambda self, x: self.layer(x, x, x)[0],
            layer=nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True),
        ),
        (5, 4),
    ),
    "a scaled weight": Spec(
        lambda: Wired(
            lambda self, x: functional.dropout(functional.linear(x, self.layer.weight * 2.0), 0.5),
            layer=nn.Linear(4, 8),
        ),
        (4,),
    ),
}


@pytest.mark.parametrize("name", DROPPING)
def test_a_model_with_dropout_is_taken(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Other numbers are dropped in each pass and for each record; every contribution is within its bound."""
    made = problem(DROPPING[name], torch.float32, count=5)
    made = replace(
        made, inputs=made.inputs[:1].expand(5, *made.inputs.shape[1:]), labels=made.labels[:1].expand(5)
    )
    engine = made.engine()
    assert not caplog.records
    torch.manual_seed(0)
    drawn = [rows(made, engine) for _ in range(2)]
    assert naive.relative(*drawn) > 1e-2
    assert min(float((drawn[0][i] - drawn[0][j]).norm()) for i in range(5) for j in range(i)) > 1e-3
    bound = 0.2 * float(drawn[0].norm(dim=1).median())
    for i in range(5):
        assert float(engine.clipped_sum(*made.some([i]).arguments, L2(bound)).norm()) <= bound


RIGHT_AT_ANY_START = {
    "low-rank adaptation that starts at zero": Spec(
        lambda: Wired(
            lambda self, x: functional.linear(x @ self.a.T, self.b),
            a=nn.Parameter(torch.randn(3, 4)),
            b=nn.Parameter(torch.zeros(2, 3)),
        ),
        (4,),
    ),
    "folded by time before a layer that starts at zero": Spec(
        lambda: Wired(
            lambda self, x: self.last(
                self.layer(x.transpose(0, 1).reshape(-1, 4)).view(3, len(x), 5).tanh().sum(0)
            ),
            layer=nn.Linear(4, 5),
            last=zero_start(nn.Linear(5, 2)),
        ),
        (3, 4),
    ),
    "a small part that is folded by time": Spec(
        lambda: Wired(
            lambda self, x: (
                self.main(x.flatten(1))
                + 1e-5 * self.layer(x.transpose(0, 1).reshape(-1, 4)).view(3, len(x), 2).tanh().sum(0)
            ),
            layer=nn.Linear(4, 2),
            main=nn.Linear(12, 2),
        ),
        (3, 4),
    ),
    "a small part whose weight is transposed": Spec(
        lambda: Wired(
            lambda self, x: self.main(x) + 1e-5 * (x @ self.w.T),
            w=nn.Parameter(torch.randn(2, 4)),
            main=nn.Linear(4, 2),
        ),
        (4,),
    ),
}


@pytest.mark.parametrize("name", RIGHT_AT_ANY_START)
def test_no_gradient_is_left_out_or_mistaken_because_it_is_small_at_the_start(name: str) -> None:
    """Compared parameter by parameter, each relative to its own size."""
    made = problem(RIGHT_AT_ANY_START[name])
    found = rows(made, made.engine())
    for place in made.model.places.values():
        assert naive.relative(found[:, place], made.gradients[:, place]) < 1e-9

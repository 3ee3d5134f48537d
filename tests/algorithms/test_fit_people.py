"""`fit` for people of whom there are several records: one record each, whatever their records are."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from algorithms import DPGD, DPSGD, ObjectivePerturbation, OptimizerConfig, fit, fitting
from algorithms.errors import RefusedError
from algorithms.fit_inputs import GivenRecords, pooled, records_of
from algorithms.models.objectives import IGNORED
from algorithms.privacy.card import text, verify
from algorithms.privacy.ledger import Ledger

DRAW = np.random.default_rng(3)
who = np.array(["ann", "bob", "ann", "cy", "ann", "bob", "dee", "ann"])
X, Y = DRAW.normal(size=(8, 5)).astype(np.float32), np.array([0, 1, 1, 0, 1, 1, 0, 0])
KEY = b"a key"
FEW = DPSGD(steps=3, expected_batch_size=2)


def call(**changes: Any) -> fitting.Fitted:
    torch.manual_seed(1)
    asked = {"model": nn.Linear(5, 2), "loss": "cross_entropy", "X": X, "y": Y, "method": FEW, "epsilon": 3.0}
    return fit(**(asked | {"delta": 0.01, "people": who, "per_person": 2} | changes))  # type: ignore[no-any-return]


def of(people: Any, rows: np.ndarray, most: int = 2) -> GivenRecords:
    return pooled(records_of(nn.Linear(5, 2), X[rows], Y[rows], "cross_entropy"), people[rows], most, KEY)


def test_a_person_is_one_record_of_at_most_so_many() -> None:
    found = of(who, np.arange(8))
    assert found.features.shape == (4, 2, 5) and found.labels.shape == (4, 2)
    names = ["ann", "bob", "cy", "dee"]
    for name, features, labels in zip(names, found.features, found.labels, strict=True):
        own = who == name
        there = labels != IGNORED
        assert there.sum() == min(2, own.sum())
        for row, label in zip(features[there], labels[there], strict=True):
            assert ((X[own] == row).all(axis=1) & (Y[own] == label)).any()


def test_what_is_used_of_a_person_follows_from_her_own_records_alone() -> None:
    whole = of(who, np.arange(8))
    for gone in ("bob", "dee"):
        rest = of(who, np.flatnonzero(who != gone))
        kept = np.array([name != gone for name in ("ann", "bob", "cy", "dee")])
        assert np.array_equal(rest.features, whole.features[kept])
        assert np.array_equal(rest.labels, whole.labels[kept])
    turned = of(who, np.arange(8)[::-1])
    by_name = dict(zip(["ann", "dee", "bob", "cy"], turned.features, strict=True))
    assert np.array_equal(by_name["ann"], whole.features[0])


def test_a_step_is_along_the_mean_of_the_clipped_means_of_people() -> None:
    """Of many like these four, so that the noise is small beside it."""
    copies = 200
    names = [f"{name} {copy}" for copy in range(copies) for name in who]
    method = DPGD(steps=1, clip_norm=0.5, update=OptimizerConfig(1.0))
    found = call(
        X=np.tile(X, (copies, 1)),
        y=np.tile(Y, copies),
        people=names,
        per_person=4,
        method=method,
        epsilon=8.0,
        delta=1e-3,
    )
    torch.manual_seed(1)
    start = nn.Linear(5, 2)
    total = [torch.zeros_like(part) for part in start.parameters()]
    for name in sorted(set(who)):
        own = torch.from_numpy(who == name)
        loss = nn.functional.cross_entropy(start(torch.from_numpy(X)[own]), torch.from_numpy(Y)[own])
        gradients = torch.autograd.grad(loss, list(start.parameters()))
        norm = float(torch.cat([part.flatten() for part in gradients]).norm())
        for part, gradient in zip(total, gradients, strict=True):
            part += gradient * min(1.0, 0.5 / norm)
    for before, after, part in zip(start.parameters(), found.model.parameters(), total, strict=True):
        assert torch.allclose(after, before - part / 4, atol=0.005)


def test_the_card_and_the_ledger_speak_of_people(own_home: Any) -> None:
    found = call(population="visitors", cap=(5.0, 0.1))
    setting = found.card.setting
    assert (setting.unit, setting.records, setting.per_person, setting.pooled) == ("one person", 4, 2, 2)
    assert "2 were used at most" in text.protected(found.card)
    assert not verify(found.card, unsigned=True).failures
    ledger = Ledger.open(f"sqlite:///{own_home}/ledger.sqlite")
    assert ledger.terms("visitors").bound["unit"] == "one person"


def test_one_record_of_a_person_is_a_record_as_any_other() -> None:
    found = call(per_person=1, y=X[:, 0], model=nn.Linear(5, 1), loss="mse_loss")
    assert (found.card.setting.per_person, found.card.setting.pooled) == (1, None)
    assert found.card.setting.records == 4


class _Named(nn.Linear):
    def forward(self, first: torch.Tensor, kind: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.cat([first, kind.to(first.dtype)], dim=1))


def test_a_persons_records_may_have_several_parts() -> None:
    kinds = np.arange(8)[:, None] % 3
    public = {"public": True, "noise": "seeded", "per_person": 4}
    torch.manual_seed(1)
    of_parts = call(model=_Named(6, 2), X={"first": X, "kind": kinds}, **public)
    torch.manual_seed(1)
    together = call(model=nn.Linear(6, 2), X=np.concatenate([X, kinds], axis=1), **public)
    assert of_parts.card.setting.pooled == 4
    for one, other in zip(of_parts.model.parameters(), together.model.parameters(), strict=True):
        assert torch.allclose(one, other)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"people": who[:5]}, "give a number or a name for each of the 8 records"),
        ({"people": np.stack([who, who])}, "give a number or a name for each of the 8 records"),
        ({"people": [None, *who[1:]]}, "names nobody for some records"),
        ({"people": [float("nan"), *who[1:]]}, "names nobody for some records"),
        ({"per_person": 0}, "at least 1"),
        ({"per_person": None}, "give both, or neither"),
        ({"people": None}, "give both, or neither"),
        ({"delta": 0.3}, "delta"),
        ({"method": ObjectivePerturbation()}, "over single rows"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(RefusedError, match=said):
        call(**changes)

"""The rows of a person as one record: by the engine, by every method, and by `fit`."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from algorithms import DPSGD, ObjectivePerturbation, fit, fitting
from algorithms.core.user_level import user_level_barrier, user_level_model
from algorithms.errors import RefusedError
from algorithms.fit_records import FitRecords, group_rows_by_user, records_of
from algorithms.gradients import L2, Engine
from algorithms.models import Model, build
from algorithms.models.objectives import IGNORED
from algorithms.privacy.card import text, verify
from algorithms.privacy.ledger import Ledger
from algorithms.privacy.mechanisms.release import Gaussian
from data.readers.records import RecordBatch
from tests.support import bench
from tests.support.barriers import barrier
from tests.support.device import DEVICE
from tests.support.refusals import refused_as
from tests.support.soak import soak_but

ROWS, PEOPLE = 3, 10
COUNTS = torch.tensor([1, 2, 3, 3, 2, 1, 3, 1, 2, 3])
"""Rows of each person."""


def labels_of(predicts: str, shape: tuple[int, ...]) -> Tensor:
    """Of all rows, those that are not there marked as such."""
    draw = torch.Generator().manual_seed(5)
    absent = torch.arange(ROWS)[None] >= COUNTS[:, None]
    if predicts == "class":
        return torch.randint(0, 2, (PEOPLE, ROWS), generator=draw).masked_fill(absent, IGNORED)
    labels = torch.rand(PEOPLE, ROWS, *shape, generator=draw)
    absent = absent.view(PEOPLE, ROWS, *[1] * len(shape))
    return (labels.round() if predicts == "labels" else labels).masked_fill(absent, torch.nan)


def rows_of(model: Model, inputs: Tensor, labels: Tensor) -> Callable[[int, Tensor], Tensor]:
    """The gradient of a person's mean loss at parameters, by the rows that are there alone."""

    def gradient(person: int, parameters: Tensor) -> Tensor:
        count = int(COUNTS[person])
        point = parameters.clone().requires_grad_()
        outputs = model.outputs(model.by_name(point), inputs[person, :count])
        loss = model.losses(outputs, labels[person, :count]).mean()
        (found,) = torch.autograd.grad(loss, point)
        return found.double()

    return gradient


@pytest.mark.parametrize(
    ("name", "shape", "predicts"),
    [
        ("unit_linear", (6,), "class"),
        ("mlp", (6,), "class"),
        ("mlp", (6,), "number"),
        ("mlp", (6,), "labels"),
        ("scatter_cnn", (81, 4, 4), "class"),
        ("bilstm", (5,), "class"),
    ],
)
def test_a_person_s_gradient_is_the_mean_of_its_rows_clipped_once(
    name: str, shape: tuple[int, ...], predicts: str
) -> None:
    tokens = 20 if name == "bilstm" else None
    outputs = {"class": 2, "number": 1, "labels": 4}[predicts]
    model = build(name, input_shape=shape, classes=outputs, seed=0, tokens=tokens, predicts=predicts)
    draw = torch.Generator().manual_seed(1)
    inputs = torch.randn(PEOPLE, ROWS, *shape, generator=draw)
    if tokens is not None:
        inputs = torch.randint(0, tokens, inputs.shape, generator=draw).int()
    labels = labels_of(predicts, model.label_shape)
    people = user_level_model(model, ROWS)
    parameters = people.initial_parameters()
    assert torch.equal(parameters, model.initial_parameters())
    engine = Engine(people, input_shape=(ROWS, *shape), input_dtype=inputs.dtype)
    each = [rows_of(model, inputs, labels)(person, parameters) for person in range(PEOPLE)]
    bound = float(torch.stack(each).norm(dim=1).median())
    wanted = sum(one * min(1.0, bound / float(one.norm())) for one in each)
    found = engine.clipped_sum(parameters, inputs, labels, L2(bound))
    assert torch.linalg.vector_norm(found - wanted) <= 1e-5 * torch.linalg.vector_norm(wanted)


def test_what_is_learned_of_people_is_the_mean_of_their_rows() -> None:
    """With noise far below what is compared; a row that is not there counts for nothing, though it is filled up."""
    model = build("unit_linear", input_shape=(4,), classes=2, seed=0)
    inputs = torch.randn(PEOPLE, ROWS, 4, generator=torch.Generator().manual_seed(2))
    labels, noise = labels_of("class", ()), Gaussian(1e-6)
    asked = user_level_barrier(
        barrier(RecordBatch(inputs.numpy(), labels.numpy()), user_level_model(model, ROWS)), ROWS
    )
    assert asked.input_shape == (4,)
    total = asked.total(lambda row, _label: row * row, bound=L2(100.0), noise=noise)
    means = [(inputs[who, : COUNTS[who]] ** 2).mean(0) for who in range(PEOPLE)]
    assert torch.allclose(total.float(), torch.stack(means).sum(0), atol=1e-2)
    moment = asked.moment(lambda row, _label: row[None], bound=L2(100.0), noise=noise)
    squares = [
        inputs[who, : COUNTS[who]].T @ inputs[who, : COUNTS[who]] / COUNTS[who] for who in range(PEOPLE)
    ]
    assert torch.allclose(moment.float(), torch.stack(squares).sum(0), atol=1e-2)


def test_no_person_adds_more_than_the_bound_however_many_rows_it_has() -> None:
    model = build("unit_linear", input_shape=(4,), classes=2, seed=0)
    noise = Gaussian(1e-6)
    inputs, labels = torch.full((1, ROWS, 4), 50.0), torch.zeros(1, ROWS, dtype=torch.int64)
    asked = user_level_barrier(
        barrier(RecordBatch(inputs.numpy(), labels.numpy()), user_level_model(model, ROWS)), ROWS
    )
    total = asked.total(lambda row, _label: row, bound=L2(1.0), noise=noise)
    assert 0.99 < float(total.norm()) < 1.001
    moment = asked.moment(lambda row, _label: row[None], bound=L2(1.0), noise=noise)
    assert 0.99 < float(torch.linalg.matrix_norm(moment)) < 1.001


REFUSED = {"lbfgs", "objective_perturbation", "output_perturbation"}


ASKING = [
    *(
        "dp_sgd",
        "quantile_clipping",
        "adaclip",
        "dpis",
        "dp_agd",
        "matrix_factorisation",
        "priv_gene",
        "majority",
    ),
    *sorted(REFUSED),
]
"""One method for each kind of query of the barrier, which alone sees the rows, and those that are refused."""


@pytest.mark.parametrize("name", soak_but(ASKING, bench.SETTINGS))
def test_people_whose_rows_are_alike_are_trained_on_as_one_row(name: str, tmp_path: Path) -> None:
    """By every method that takes steps; those that ask the barrier for a minimum refuse in their plan."""
    method, model = bench.algorithm(name), bench.small_model("logistic", classes=2)
    plain = bench.planned(method, model, accountant="rdp")
    known = replace(plain.facts, rows_per_user=ROWS)
    if name in REFUSED:
        with refused_as("minimum_of_people", rows=3):
            method.plan(plain.target, known)
        return
    plan, rows = method.plan(plain.target, known), bench.made_up(classes=2)
    people = bench.MadeUp(rows.features[:, None].repeat(ROWS, 1), rows.labels[:, None].repeat(ROWS, 1))
    people.labels[::2, 1:] = IGNORED
    found, wanted = (
        bench.trained(method, one, model, tmp_path / str(place), records=lambda data=data: data)
        for place, (one, data) in enumerate([(plan, people), (plain, rows)])
    )
    if DEVICE.type == "cpu":  # an accelerator rounds rows otherwise, and `dpis` goes by noisy norms
        assert [row.event for row in found.trace.rows] == [row.event for row in wanted.trace.rows]
    released, expected = method.released(found.state), method.released(wanted.state)
    assert torch.allclose(released, expected, atol=1e-5) and not torch.equal(
        expected.cpu(), model.initial_parameters()
    )


DRAW = np.random.default_rng(3)
who = np.array(["ann", "bob", "ann", "cy", "ann", "bob", "dee", "ann"])
X, Y = DRAW.normal(size=(8, 5)).astype(np.float32), np.array([0, 1, 1, 0, 1, 1, 0, 0])
KEY = b"a key"
FEW = DPSGD(steps=3, expected_batch_size=2)


def call(**changes: Any) -> fitting.Fitted:
    torch.manual_seed(1)
    asked = {"model": nn.Linear(5, 2), "loss": "cross_entropy", "X": X, "y": Y, "method": FEW, "epsilon": 3.0}
    return fit(**(asked | {"delta": 0.01, "people": who, "per_person": 2} | changes))  # type: ignore[no-any-return]


def of(people: Any, rows: np.ndarray, most: int = 2) -> FitRecords:
    return group_rows_by_user(
        records_of(nn.Linear(5, 2), X[rows], Y[rows], "cross_entropy"), people[rows], most, KEY
    )


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


def test_the_card_and_the_ledger_speak_of_people(own_home: Any) -> None:
    found = call(population="visitors", cap=(5.0, 0.1))
    setting = found.card.setting
    assert (setting.unit, setting.records, setting.per_person, setting.rows_per_user) == (
        "one person",
        4,
        1,  # a record of the run is all that a person has in it
        2,
    )
    assert "2 were used at most" in text.protection_sentence(found.card)
    assert not verify(found.card, unsigned=True).failures
    ledger = Ledger.open(f"sqlite:///{own_home}/ledger.sqlite")
    assert ledger.terms("visitors").bound["unit"] == "one person"


def test_one_record_of_a_person_is_a_record_as_any_other() -> None:
    found = call(per_person=1, y=X[:, 0], model=nn.Linear(5, 1), loss="mse_loss")
    assert (found.card.setting.per_person, found.card.setting.rows_per_user) == (1, None)
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
    assert of_parts.card.setting.rows_per_user == 4
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
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(RefusedError, match=said):
        call(**changes)


def test_what_depends_on_the_number_of_people_or_of_their_rows_is_refused() -> None:
    with refused_as("delta_above_1_n", delta=0.3, largest=0.25):
        call(delta=0.3)
    with refused_as("minimum_of_people", rows=2):
        call(method=ObjectivePerturbation())

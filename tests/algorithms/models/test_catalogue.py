"""Every model of the catalogue: its size, its gradients, its refusals."""

from typing import Any

import pytest
import torch

from algorithms.gradients import Engine
from algorithms.models import CATALOGUE, ModelRefusedError, build
from tests.algorithms.models.forms import FORMS, form_of, moved, records
from tests.support.gradients import naive
from tests.support.refusals import refused
from tests.support.soak import soak_but

OURS = [name for name in FORMS if name not in ("timm", "huggingface")]
"""Those of libraries may take any way; test_public_models compares their sums."""


def test_every_model_has_a_form_here() -> None:
    assert list(FORMS) == list(CATALOGUE)


@pytest.mark.parametrize(
    ("name", "shape", "classes", "tokens", "count"),
    [
        ("tanh_cnn", (1, 28, 28), 10, None, 26_010),
        ("relu_cnn", (1, 28, 28), 10, None, 26_010),
        ("cifar_cnn", (3, 32, 32), 10, None, 550_570),
        ("cifar_tanh_cnn", (3, 32, 32), 10, None, 550_570),
        ("conv_fc", (3, 32, 32), 10, None, 1_832_266),
        ("mlp", (60,), 10, None, 71_010),
        ("unit_linear", (81, 7, 7), 10, None, 39_700),
        ("scatter_linear", (81, 7, 7), 10, None, 39_700),
        ("scatter_cnn", (81, 7, 7), 10, None, 33_066),
        ("scatter_cnn", (243, 8, 8), 10, None, 187_210),
        ("bilstm", (80,), 2, 20_000, 20_946),
    ],
)
def test_a_model_has_the_published_size(
    name: str, shape: tuple[int, ...], classes: int, tokens: int | None, count: int
) -> None:
    model = build(name, input_shape=shape, classes=classes, seed=0, tokens=tokens)
    assert model.parameter_count == count


@pytest.mark.parametrize("name", ["scatter_linear", "scatter_cnn"])
def test_without_groups_the_coefficients_are_taken_as_they_come(name: str) -> None:
    form = FORMS[name]
    plain, normalised = form_of(name, groups=0), form_of(name)
    values, _ = records(form)
    at = moved(plain)
    front = torch.nn.GroupNorm(form.settings.get("groups", 27), form.shape[0], affine=False)
    found = plain.outputs(plain.by_name(at), front(values))
    torch.testing.assert_close(found, normalised.outputs(normalised.by_name(at), values))
    assert not torch.allclose(found, plain.outputs(plain.by_name(at), values))


@pytest.mark.parametrize(
    "name", soak_but(["additive", "linear", "conv_fc", "huber_svm", "scatter_cnn", "unit_linear"], OURS)
)
def test_the_engine_s_sum_is_that_of_a_loop_and_takes_the_recorded_way(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, form = form_of(name), FORMS[name]
    inputs, labels = records(form)
    engine = Engine(model, input_shape=form.shape, input_dtype=inputs.dtype)
    assert not caplog.records, "a model that is taken record by record is slow"
    assert not engine.is_random
    point = moved(model)
    rows = naive.loop(model, point, inputs, labels)
    for kind, clipping in naive.clippings(model, rows).items():
        expected = naive.contributions(model, rows, clipping).sum(dim=0)
        found = engine.clipped_sum(point, inputs, labels, clipping)
        assert naive.relative(found, expected) < (5e-5 if kind == "Affine" else 1e-5), kind


@pytest.mark.parametrize("name", FORMS)
def test_scores_have_a_class_for_each_output_and_losses_one_for_each_record(name: str) -> None:
    model, form = form_of(name), FORMS[name]
    inputs, labels = records(form)
    outputs = model.outputs(model.by_name(moved(model)), inputs)
    assert model.scores(outputs).shape == (len(labels), form.classes)
    assert model.losses(outputs, labels).shape == labels.shape
    if name == "linear":  # of a number: the nearer, the less
        near, far = outputs[:, 0] + 0.1, outputs[:, 0] - 0.2
        assert (model.losses(outputs, near) < model.losses(outputs, far)).all()
        return
    likely = model.scores(outputs).argmax(dim=1)
    unlikely = (likely + 1) % form.classes
    assert (model.losses(outputs, likely) < model.losses(outputs, unlikely)).all()


def test_relu_and_tanh_forms_differ_in_nothing_but_the_activation() -> None:
    for one, other in (("tanh_cnn", "relu_cnn"), ("cifar_tanh_cnn", "cifar_cnn")):
        a, b = form_of(one), form_of(other)
        assert a.shapes == b.shapes
        assert torch.equal(a.initial_parameters(), b.initial_parameters())
        inputs, _ = records(FORMS[one])
        assert not torch.allclose(a.outputs({}, inputs), b.outputs({}, inputs))


def test_a_unit_record_has_norm_one_and_the_constant_and_zero_stays_zero() -> None:
    module = form_of("unit_linear", bias=0.4).module[0]  # type: ignore[index]
    inputs = torch.stack([torch.zeros(2, 3), 7.0 * torch.ones(2, 3), 1e-3 * torch.ones(2, 3)])
    outputs = module(inputs)
    torch.testing.assert_close(outputs[:, :-1].norm(dim=1), torch.tensor([0.0, 1.0, 1.0]))
    assert (outputs[:, -1] == 0.4).all()


def test_a_scattered_record_is_normalised_by_groups_of_its_own_channels() -> None:
    model, (inputs, _) = form_of("scatter_linear"), records(FORMS["scatter_linear"])
    groups = inputs.view(len(inputs), 3, -1)
    spread = groups.var(dim=2, correction=0, keepdim=True)
    expected = ((groups - groups.mean(dim=2, keepdim=True)) / (spread + 1e-5).sqrt()).flatten(start_dim=1)
    found = model.module[:2](inputs)[:, :-1]  # type: ignore[index]
    torch.testing.assert_close(found, expected / expected.norm(dim=1, keepdim=True))


@pytest.mark.parametrize(
    "name", [name for name in FORMS if name.endswith(("linear", "softmax", "logistic", "svm"))]
)
def test_a_linear_form_starts_at_zero(name: str) -> None:
    assert not form_of(name).initial_parameters().any()


@pytest.mark.parametrize(
    ("name", "shape", "tokens", "settings", "message"),
    [
        ("unknown", (4,), None, {}, "no model 'unknown'; choose one of softmax"),
        ("relu_cnn", (4,), None, {}, "at least 20 x 20"),
        ("tanh_cnn", (1, 8, 8), None, {}, "at least 20 x 20"),
        ("cifar_cnn", (3, 4, 4), None, {}, "at least 8 x 8"),
        ("conv_fc", (60,), None, {}, "at least 4 x 4"),
        ("scatter_linear", (80, 7, 7), None, {}, "27 groups divide"),
        ("scatter_linear", (81, 1, 1), None, {"groups": 81}, "81 groups divide"),
        ("scatter_linear", (81,), None, {}, "maps"),
        ("scatter_cnn", (27, 7, 7), None, {}, "81 or 243 channels"),
        ("bilstm", (80,), None, {}, "takes texts as tokens"),
        ("bilstm", (8, 8), 20, {}, "takes texts as tokens"),
        ("softmax", (80,), 20, {}, "the data are tokens of a text; use 'bilstm'"),
        ("mlp", (6,), None, {"width": 3}, "no setting 'width'; its settings are hidden"),
        ("softmax", (6,), None, {"hidden": 3}, "no setting 'hidden'; it has none"),
        ("mlp", (6,), None, {"hidden": 0}, "setting hidden of the model 'mlp' is 0"),
        ("mlp", (6,), None, {"hidden": "many"}, "setting hidden of the model 'mlp' is 'many'"),
        ("scatter_linear", (81, 7, 7), None, {"bias": float("nan")}, "setting bias"),
        ("bilstm", (80,), 20, {"activation": "swish"}, "setting activation"),
        ("bilstm", (80,), 20, {"embedding": "glove"}, "belong to glove alone"),
        ("bilstm", (80,), 20, {"embedding_file": "vectors.txt"}, "belong to glove alone"),
    ],
)
def test_a_model_that_does_not_fit_is_refused_in_one_sentence(
    name: str, shape: tuple[int, ...], tokens: int | None, settings: dict[str, Any], message: str
) -> None:
    with refused(message, ModelRefusedError):
        build(name, input_shape=shape, classes=2, seed=0, tokens=tokens, settings=settings)


@pytest.mark.parametrize("name", ["svm", "logistic"])
def test_a_model_of_two_classes_is_refused_for_more(name: str) -> None:
    with pytest.raises(ModelRefusedError, match="is for 2 classes"):
        build(name, input_shape=(4,), classes=3, seed=0)

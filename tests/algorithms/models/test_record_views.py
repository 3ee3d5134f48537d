"""Several views of one record: its gradient is their mean, and evaluation sees the record itself."""

import numpy as np
import pytest
import torch
from torch import Tensor

from algorithms.gradients import L2, Engine
from algorithms.models import Model, ModelRefusedError, build, for_evaluation
from algorithms.models.feature_transforms import VIEWS
from algorithms.models.saved import adapt
from algorithms.privacy.barrier.compute_config import ComputeConfig
from data.readers.records import RecordBatch
from tests.algorithms.models.forms import FORMS, form_of, moved, records
from tests.support.gradients import naive
from tests.support.gradients.problems import BRIEF
from tests.support.refusals import refused_as

NAMES = ["softmax", "conv_fc"]


def seen(name: str, count: int) -> Model:
    return adapt(form_of(name), input_shape=FORMS[name].shape, augmentations=count)


def test_the_first_views_are_the_image_and_its_mirror_image() -> None:
    images = torch.arange(32.0).view(1, 2, 4, 4)
    assert torch.equal(VIEWS[0].of(images), images)
    assert torch.equal(VIEWS[1].of(images), images.flip(3))
    assert len(set(VIEWS)) == len(VIEWS) == 18


def test_a_shift_moves_the_image_and_continues_its_edge_by_reflection() -> None:
    images = torch.arange(25.0).view(1, 1, 5, 5)
    by_right = {view.right: view.of(images)[0, 0, 0] for view in VIEWS if not (view.is_mirrored or view.down)}
    assert by_right[2].tolist() == [2.0, 1.0, 0.0, 1.0, 2.0]
    assert by_right[-2].tolist() == [2.0, 3.0, 4.0, 3.0, 2.0]
    by_down = {
        view.down: view.of(images)[0, 0, :, 0] for view in VIEWS if not (view.is_mirrored or view.right)
    }
    assert by_down[2].tolist() == [10.0, 5.0, 0.0, 5.0, 10.0]


@pytest.mark.parametrize("name", NAMES)
def test_a_record_s_gradient_is_the_mean_of_its_views(name: str) -> None:
    count, form = 5, FORMS[name]
    one, several = form_of(name), seen(name, count)
    assert several.shapes == one.shapes
    inputs, labels = records(form)
    point = moved(one)
    rows = _mean([naive.loop(one, point, view.of(inputs), labels) for view in VIEWS[:count]])
    torch.testing.assert_close(naive.loop(several, point, inputs, labels), rows, rtol=1e-4, atol=1e-6)
    engine = Engine(several, input_shape=form.shape, limits=BRIEF)
    assert engine.inspection.layouts is not None and not engine.inspection.without_rule
    clipping = L2(float(rows.norm(dim=1).median()))
    expected = naive.contributions(one, rows, clipping).sum(dim=0)
    assert naive.relative(engine.clipped_sum(point, inputs, labels, clipping), expected) < 1e-5


def _mean(rows: list[Tensor]) -> Tensor:
    return torch.stack(rows).mean(dim=0)


def test_a_barrier_takes_a_model_of_several_views() -> None:
    shape = FORMS["softmax"].shape
    made = RecordBatch(np.zeros((4, *shape), np.float32), np.zeros(4, np.int64))
    assert not ComputeConfig().engine(seen("softmax", 18), made).is_random


def test_an_evaluation_sees_the_record_alone() -> None:
    one, several = form_of("cifar_cnn"), seen("cifar_cnn", 4)
    inputs, labels = records(FORMS["cifar_cnn"])
    named = one.by_name(moved(one))
    plain = one.outputs(named, inputs)
    outputs = several.outputs(named, inputs)
    torch.testing.assert_close(several.scores(outputs), plain)
    assert not torch.allclose(several.losses(outputs, labels), one.losses(plain, labels))
    alone = for_evaluation(several)
    torch.testing.assert_close(alone.losses(alone.outputs(named, inputs), labels), one.losses(plain, labels))
    assert several.outputs(named, inputs).shape == (5, 4, 3), "the model itself was changed"
    assert for_evaluation(one) is one


@pytest.mark.parametrize(("name", "count"), [("mlp", 2), ("scatter_cnn", 2), ("bilstm", 2), ("softmax", 19)])
def test_views_of_what_is_no_image_and_more_than_there_are_are_refused(name: str, count: int) -> None:
    code = "too_many_views" if count == 19 else "views_of_images"
    with refused_as(code, ModelRefusedError, count=count):
        seen(name, count)


def test_views_of_a_tiny_image_are_refused() -> None:
    model = build("softmax", input_shape=(1, 2, 9), classes=2, seed=0)
    with refused_as("views_of_images", ModelRefusedError):
        adapt(model, input_shape=(1, 2, 9), augmentations=2)

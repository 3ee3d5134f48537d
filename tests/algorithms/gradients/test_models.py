"""A model's parameters as one flat vector, and the loss that is made here."""

import torch
from torch import nn

from algorithms.models import Model, build
from algorithms.models.objectives import cross_entropy
from tests.algorithms.gradients.zoo import Wired, frozen
from tests.algorithms.models.forms import form_of


def test_the_huber_hinge_is_the_hinge_with_its_kink_rounded_off() -> None:
    """Chaudhuri et al. 2011, section 3.4.2, by the integral of its slope -P(u > z), u uniform in [1/2, 3/2]."""
    model, margins = build("huber_svm", input_shape=(1,), classes=2, seed=0), torch.linspace(-2.0, 3.0, 501)
    outputs = torch.cat([margins, -margins]).double()[:, None].requires_grad_()
    losses = model.losses(outputs, torch.arange(2).repeat_interleave(501).flip(0))
    (slopes,) = torch.autograd.grad(losses.sum(), outputs, create_graph=True)
    (curvatures,) = torch.autograd.grad((slopes * outputs.detach().sign()).sum(), outputs)
    expected = (1.5 - margins.double()).clamp(0.0, 1.0)
    torch.testing.assert_close(slopes[:501, 0], -expected, rtol=0.0, atol=1e-6)
    torch.testing.assert_close(slopes[501:, 0], expected, rtol=0.0, atol=1e-6)
    areas = torch.cumulative_trapezoid(expected.flip(0), dx=0.01).flip(0)
    torch.testing.assert_close(losses[:500], areas, rtol=0.0, atol=1e-5)
    assert model.bounds is not None
    assert float(curvatures.abs().max()) == model.bounds.curvature == 1.0
    assert float(slopes.detach().abs().max()) == model.bounds.slope == 1.0
    assert float(losses.detach().min()) == model.bounds.least == 0.0


def test_the_flat_vector_is_the_parameters_in_their_order() -> None:
    model = form_of("tanh_cnn")
    flat = model.initial_parameters()
    named = model.named(flat)
    assert list(named) == [name for name, _ in model.module.named_parameters()]
    assert all(torch.equal(named[name], parameter) for name, parameter in model.module.named_parameters())
    starts, ends = zip(*((place.start, place.stop) for place in model.places.values()), strict=True)
    assert starts == (0, *ends[:-1]) and ends[-1] == len(flat)


def test_only_trained_parameters_are_in_the_flat_vector() -> None:
    module = nn.Sequential(frozen(nn.Linear(4, 5)), nn.Linear(5, 3))
    model = Model("frozen", module, cross_entropy, lambda outputs: outputs)
    assert list(model.shapes) == ["1.weight", "1.bias"]
    assert model.parameter_count == 5 * 3 + 3
    assert model.layers == (("1.weight", "1.bias"),)


def test_a_shared_parameter_is_in_the_flat_vector_once() -> None:
    table, decoder = nn.Embedding(6, 4), nn.Linear(4, 6)
    decoder.weight = table.weight
    module = Wired(lambda self, words: self.decoder(self.table(words)), table=table, decoder=decoder)
    model = Model("tied", module, cross_entropy, lambda outputs: outputs)
    assert model.parameter_count == 6 * 4 + 6
    moved = model.initial_parameters() + 1.0
    words = torch.tensor([[0, 5]])
    expected = (table.weight[words] + 1.0) @ (table.weight + 1.0).T + decoder.bias + 1.0
    torch.testing.assert_close(model.outputs(model.named(moved), words), expected)


def test_the_precision_is_the_one_that_is_asked_for() -> None:
    for word, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        assert build("softmax", input_shape=(4,), classes=3, seed=0, precision=word).precision == dtype

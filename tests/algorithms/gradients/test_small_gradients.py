"""Gradients of small parameters, which are measured and summed together."""

import math

import pytest
import torch

from algorithms.gradients import L2, Affine, PerExampleGradients
from algorithms.gradients.parameter_gradients import BiasGrad, DenseGrad, LinearGrad, PerExample
from algorithms.gradients.small_gradients import SmallGradients
from algorithms.gradients.table_gradients import EmbeddingGrad
from tests.support.gradients.forms import written

FEW, MANY = 64, 2176
"""Records that are processed at once, and in several parts."""


def layer(records: int, inputs: int, outputs: int, length: int = 1) -> LinearGrad:
    return LinearGrad(torch.randn(records, length, inputs), torch.randn(records, length, outputs))


def table(records: int, entries: int, width: int, length: int = 1) -> EmbeddingGrad:
    return EmbeddingGrad(
        torch.randint(0, entries, (records, length)), torch.randn(records, length, width), entries
    )


def network(records: int, *, large: bool) -> dict[str, PerExample]:
    """Layers with and without bias, biases of frozen layers, sequences, materialised gradients and tables."""
    first, last, frozen = layer(records, 60, 20), layer(records, 20, 3), layer(records, 7, 5)
    found: dict[str, PerExample] = {
        "last.bias": BiasGrad(last),
        "scale": DenseGrad(torch.randn(records, 20)),
        "last": last,
        "sequence": layer(records, 6, 4, length=9),
        "frozen.bias": BiasGrad(frozen),
    }
    if large:
        found |= {"first": first, "alone": layer(records, 30, 30), "first.bias": BiasGrad(first)}
        found["wide"] = layer(records, 300, 2)
        found |= {"items": table(records, 9, 64), "wide rows": table(records, 3, 65)}
        found |= {"people": table(records, 50, 3), "words": table(records, 20, 3, length=2)}
    return found


def of(gradients: dict[str, PerExample], padding: int = 0) -> PerExampleGradients:
    sizes = [written(each).shape[1] for each in gradients.values()]
    ends = torch.tensor(sizes).cumsum(dim=0).tolist()
    places = {name: slice(end - size, end) for name, end, size in zip(gradients, ends, sizes, strict=True)}
    counted = len(written(next(iter(gradients.values())))) - padding
    layers = tuple((name,) for name in gradients)
    return PerExampleGradients(torch.zeros(counted), gradients, places, layers, torch.float32, padding)


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("records", [FEW, MANY])
@pytest.mark.parametrize("large", [True, False])
def test_norms_and_sums_are_those_of_all_gradients(large: bool, records: int, padding: int) -> None:
    torch.manual_seed(0)
    gradients = network(records, large=large)
    found = of(gradients, padding)
    rows = torch.cat([written(each) for each in gradients.values()], dim=1)[: records - padding]
    norms = rows.norm(dim=1)
    torch.testing.assert_close(found.norms(L2(1.0)), norms, rtol=1e-6, atol=0.0)
    assert (found.norms(L2(1.0)) >= norms * (1 - 1e-6)).all()
    bound = float(norms.median())
    expected = (rows * (bound / norms).clamp(max=1.0)[:, None]).sum(dim=0)
    torch.testing.assert_close(
        found.clipped_sum(L2(bound)), expected, rtol=1e-5, atol=1e-5 * float(expected.norm())
    )


@pytest.mark.parametrize("records", [FEW, MANY])
def test_norms_and_sums_of_many_layers_are_those_of_all_gradients(records: int) -> None:
    torch.manual_seed(0)
    layers = [layer(records, inputs, 40 + inputs) for inputs in range(1, 60, 8)]
    gradients: dict[str, PerExample] = {str(number): each for number, each in enumerate(layers)}
    gradients |= {f"{number}.bias": BiasGrad(each) for number, each in enumerate(layers) if number % 3}
    found, rows = of(gradients), torch.cat([written(each) for each in gradients.values()], dim=1)
    norms = rows.norm(dim=1)
    torch.testing.assert_close(found.norms(L2(1.0)), norms, rtol=1e-6, atol=0.0)
    bound = float(norms.median())
    expected = (rows * (bound / norms).clamp(max=1.0)[:, None]).sum(dim=0)
    torch.testing.assert_close(
        found.clipped_sum(L2(bound)), expected, rtol=1e-5, atol=1e-5 * float(expected.norm())
    )


def sequences(records: int, length: int) -> dict[str, PerExample]:
    """Layers of which some have one shape, with biases of other widths, some of frozen layers."""
    alike, other = [layer(records, 6, 4, length) for _ in range(3)], layer(records, 4, 6, length)
    biases = {f"{number}.bias": BiasGrad(each) for number, each in enumerate((*alike[1:], other))}
    frozen = BiasGrad(layer(records, 9, 2, length))
    named = {str(number): each for number, each in enumerate((*alike, other))}
    return {**biases, **named, "frozen.bias": frozen, "scale": DenseGrad(torch.randn(records, 5))}


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("length", [2, 5, 400])
def test_layers_of_one_shape_are_materialised_as_each_by_itself(length: int, padding: int) -> None:
    """In one product, if they are short, else each in its own."""
    torch.manual_seed(0)
    gradients = sequences(FEW, length)
    found = of(gradients, padding)
    rows = torch.cat([written(each) for each in gradients.values()], dim=1)[: FEW - padding]
    norms = rows.norm(dim=1)
    torch.testing.assert_close(found.norms(L2(1.0)), norms, rtol=1e-6, atol=0.0)
    for name, each in gradients.items():
        torch.testing.assert_close(each.rows.double(), written(each), rtol=1e-5, atol=1e-4, msg=name)
    bound = float(norms.median())
    expected = (rows * (bound / norms).clamp(max=1.0)[:, None]).sum(dim=0)
    torch.testing.assert_close(
        found.clipped_sum(L2(bound)), expected, rtol=1e-5, atol=1e-5 * float(expected.norm())
    )


def test_narrow_layers_lookups_and_materialised_gradients_are_taken_together() -> None:
    """By the sizes of parameters, whatever the number of records."""
    torch.manual_seed(0)
    for records in (FEW, MANY):
        gradients = network(records, large=True)
        small = SmallGradients.of(gradients, of(gradients).slices)
        assert set(small.layers) == {"first", "alone", "last"} and set(small.materialized) == {
            "scale",
            "sequence",
        }
        assert small.biases == {"first": "first.bias", "last": "last.bias"}
        assert set(small.lookups) == {"items", "people"}
        few = {name: each for name, each in gradients.items() if name in ("last", "last.bias", "scale")}
        assert SmallGradients.of(few, of(few).slices).materialized.keys() == few.keys()


def test_small_layers_are_materialised_however_short_their_sequences() -> None:
    """Gram matrices would take fewer operations, but more calls."""
    small, large = layer(FEW, 32, 32, length=2), layer(FEW, 33, 32, length=2)
    gradients: dict[str, PerExample] = {"small": small, "large": large}
    assert SmallGradients.of(gradients, of(gradients).slices).materialized.keys() == {"small"}
    assert not large.is_materialized


def test_a_record_that_is_not_finite_adds_nothing_and_the_others_add_the_same() -> None:
    torch.manual_seed(0)
    gradients = network(FEW, large=True)
    expected = of(gradients).take(torch.arange(1, FEW)).clipped_sum(L2(1.0))
    first = gradients["first"]
    assert isinstance(first, LinearGrad)
    first.inputs[0, 0, 0] = torch.nan
    torch.testing.assert_close(of(gradients).clipped_sum(L2(1.0)), expected)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_record_taken_apart_leaves_the_last_bits_of_the_others(value: float) -> None:
    """A layer of 128 numbers and its bias are more than those that are materialised, whose rows are rounded."""
    torch.manual_seed(0)
    last = layer(FEW, 64, 2)
    last.inputs[0] = value
    first, others = last.take(slice(0, 1)), last.take(slice(1, None))
    whole, one, rest = (
        of({"last": each, "last.bias": BiasGrad(each)}).clipped_sum(L2(1.0)) for each in (last, first, others)
    )
    assert (whole - one - rest).abs().max() < 1e-14


@pytest.mark.parametrize("measured_before", [True, False])
def test_an_affine_map_is_summed_as_it_is_measured(measured_before: bool) -> None:
    """Where shift and gradient cancel, the rounding of materialised gradients would exceed the bound."""
    torch.manual_seed(0)
    for _ in range(20):
        last = layer(1, 10, 3)
        found = of({"last": last, "last.bias": BiasGrad(last)})
        whole = torch.cat([written(last)[0], last.grad_outputs[0, 0].double()])
        shift, scale = whole.float() * (1 + 2e-3 * torch.randn(33)), torch.exp(4 * torch.rand(33) - 2)
        bound = float(((whole - shift.double()) / scale.double()).norm())
        bound = max(bound, float((shift / scale).norm()) / 999)
        if measured_before:
            found.norms(L2(1.0))
        assert float(found.clipped_sum(Affine(bound, shift, scale)).norm()) <= bound

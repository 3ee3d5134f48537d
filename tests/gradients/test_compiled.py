"""Sums in C++ against the pure ones, which are the default, and against their definition."""

import math
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import softplus

from algorithms.gradients import L1, L2, Clipping, Unclipped, compiled
from algorithms.gradients.linear import LinearRecords
from tests.checkout import PROJECT
from tests.gradients.test_linear import a_line, apart, problem, the_loop
from tests.threads import cpu_threads

COUNTS = [1, 15, 16, 17, 64, 1000]


@pytest.fixture(scope="module", autouse=True)
def _library() -> None:
    try:
        compiled.load()
    except compiled.NotCompiled as reason:
        pytest.skip(f"nothing can be compiled here: {reason}")


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def losses(margins: Tensor, slopes: Tensor, steps: Tensor, bound: float) -> Tensor:
    return compiled.logistic_losses(margins, slopes, steps, bound=bound, most=math.exp(bound))


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("features", [1, 3, 4, 5, 8, 125])
def test_weighted_sums_are_products_in_64_bits(count: int, features: int) -> None:
    values, weights = drawn(features, count), drawn(count, seed=1)
    torch.testing.assert_close(
        compiled.weighted_sums(values, weights), values.double() @ weights.double(), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("bound", [0.1, 1.0, 10.0, 80.0])
def test_losses_are_sums_of_clipped_softplus(count: int, bound: float) -> None:
    margins, slopes = 30 * drawn(count), 20 * drawn(count, seed=1)
    steps = torch.tensor([0.0, 0.3, -2.0, 50.0], dtype=torch.float64)
    at = margins.double() - steps[:, None] * slopes.double()
    expected = softplus(at, threshold=700).clamp(max=bound).sum(dim=1)
    torch.testing.assert_close(
        losses(margins, slopes, steps, bound), expected, rtol=2e-6, atol=1e-6 * count * bound
    )


def test_many_losses_at_the_bound_neither_overflow_nor_pass_it() -> None:
    count, steps = 10_000, torch.zeros(1, dtype=torch.float64)
    for bound in (0.1, 10.0, 80.0):
        total = float(losses(torch.full((count,), 1e30), torch.zeros(count), steps, bound))
        assert total == pytest.approx(count * bound, rel=1e-9)
        assert float(losses(torch.full((1,), math.inf), torch.zeros(1), steps, bound)) <= bound * (1 + 1e-15)


def test_a_margin_that_is_not_a_number_counts_as_zero() -> None:
    margins, steps = torch.tensor([math.nan, 2.0, -math.inf]), torch.zeros(1, dtype=torch.float64)
    assert float(losses(margins, torch.zeros(3), steps, 5.0)) == pytest.approx(math.log1p(math.exp(2.0)))


@pytest.mark.parametrize("name", ["logistic", "svm", "squared", "softmax"])
@pytest.mark.parametrize("clipping", [L2(0.5), L1(0.7), Unclipped()])
def test_gradients_equal_the_loop(name: str, clipping: Clipping) -> None:
    model, parameters, inputs, labels = problem(name, 30, torch.float32)
    found = LinearRecords(model, inputs, labels, compiled=True).clipped_sum(parameters, clipping)
    assert apart(found, the_loop(model, parameters, inputs, labels, clipping)) < 1e-5


@pytest.mark.parametrize("name", ["logistic", "svm", "squared", "softmax"])
@pytest.mark.parametrize("bound", [0.01, 0.1, 1.7, 10.0, 30.0, 900.0])
def test_losses_on_a_line_equal_the_pure_ones(name: str, bound: float) -> None:
    """Records that are not finite or very long included, which are taken another way."""
    model, parameters, inputs, labels = problem(name, 3000, torch.float32)
    inputs[3], inputs[4], inputs[5] = math.nan, math.inf, 1e20
    line = a_line(parameters)
    found, pure = (
        LinearRecords(model, inputs, labels, compiled=way).losses_on(line, bound=bound)
        for way in (True, False)
    )
    torch.testing.assert_close(found, pure, rtol=1e-6, atol=0.0)


def test_a_record_counts_the_same_in_every_place_and_number() -> None:
    steps = torch.linspace(0.0, 3.0, 20, dtype=torch.float64)
    margin, slope = drawn(1), drawn(1, seed=1)
    alone = losses(margin, slope, steps, 5.0)
    for count in (2, 15, 16, 33):
        for place in {0, count // 2, count - 1}:
            margins = torch.full((count,), -math.inf).index_fill(0, torch.tensor(place), float(margin))
            assert torch.equal(losses(margins, slope.expand(count).contiguous(), steps, 5.0), alone)


def test_threads_change_no_bit() -> None:
    model, parameters, inputs, labels = problem("logistic", 5000, torch.float32)
    records = LinearRecords(model, inputs, labels, compiled=True)
    found = []
    for count in (1, 2):
        with cpu_threads(count):
            records.forget()
            sums = records.clipped_sum(parameters, L2(0.5)), records.losses_on(a_line(parameters), bound=2.0)
            found.append(torch.cat(sums))
    assert torch.equal(*found)


def test_what_they_do_not_serve_is_left_to_the_pure_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_arguments: object, **_named: object) -> None:
        raise AssertionError("a compiled sum was asked")

    for name in ("weighted_sums", "logistic_losses"):
        monkeypatch.setattr(compiled, name, never)
    monkeypatch.setattr("algorithms.gradients.linear.weighted_sums", never)
    for name, dtype in (("logistic", torch.float64), ("softmax", torch.float32)):
        model, parameters, inputs, labels = problem(name, dtype=dtype)
        for way in (True, False):
            records = LinearRecords(model, inputs, labels, compiled=way)
            records.clipped_sum(parameters, L2(0.5))
            records.losses_on(a_line(parameters), bound=2.0)


def loading_in(cache: Path, **environment: str) -> str:
    """What a process of its own says that loads the library with a cache folder of its own."""
    code = "from algorithms.gradients import compiled\ntry: compiled.load()\nexcept compiled.NotCompiled as e: print(e)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(PROJECT)} | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_without_a_compiler_the_reason_is_said_and_nothing_is_left(tmp_path: Path) -> None:
    assert "no C++ compiler" in loading_in(tmp_path, CXX="/nowhere/c++")
    assert list((tmp_path / "epsilonflow" / "compiled").iterdir()) == []


@pytest.mark.parametrize("damage", ["another library", "empty"])
def test_a_library_that_is_damaged_is_not_used(damage: str, tmp_path: Path) -> None:
    shutil.copytree(compiled._place().parent, tmp_path / "epsilonflow" / "compiled")
    other = Path(torch.__file__).parent / "lib" / "libshm.so"
    (library,) = (tmp_path / "epsilonflow" / "compiled").glob(compiled._place().name)
    library.write_bytes(other.read_bytes() if damage == "another library" else b"")
    assert "is damaged; remove it" in loading_in(tmp_path)


@pytest.mark.parametrize("writable", ["the folder", "the library"])
def test_a_library_that_others_can_write_is_not_loaded(writable: str, tmp_path: Path) -> None:
    shutil.copytree(compiled._place().parent, tmp_path / "epsilonflow" / "compiled")
    (library,) = (tmp_path / "epsilonflow" / "compiled").glob(compiled._place().name)
    (library.parent if writable == "the folder" else library).chmod(0o777)
    assert "make it yours alone" in loading_in(tmp_path)


def test_a_cache_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "epsilonflow").write_text("")
    assert "cannot be used" in loading_in(tmp_path)


def test_what_a_killed_build_left_is_removed_in_time(tmp_path: Path) -> None:
    for name, age in (("building-old", 7200), ("building-new", 60)):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    compiled._sweep(tmp_path)
    assert [left.name for left in tmp_path.iterdir()] == ["building-new"]

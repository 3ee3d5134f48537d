"""`make gpu` where no GPU is: every part of it runs, with small networks on a CPU."""

import pytest
import torch
import typer
from typer import BadParameter

from benchmarks import gpu
from benchmarks.workloads import OF_LIBRARIES, SMALL
from tests.support.checkout import PROJECT


@pytest.mark.soak
def test_small_networks_of_libraries_are_measured_on_a_cpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(PROJECT)
    before = sorted(PROJECT.glob("benchmarks/results/*")), sorted(PROJECT.glob("docs/results/gpu*"))
    with pytest.raises(typer.Exit) as ended:
        gpu.main(device="cpu", small=True, workloads="vit", tests=False)
    assert ended.value.exit_code == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("| ViT"))
    _, about, records, ours, hooks, _ghost, _jax, plain, _memory, _ = row.split("|")
    assert "small" in about and int(records) == SMALL["vit"].batch
    assert min(float(ours), float(plain), float(hooks.split()[0])) > 0
    assert (sorted(PROJECT.glob("benchmarks/results/*")), sorted(PROJECT.glob("docs/results/gpu*"))) == before


@pytest.mark.parametrize("name", SMALL)
def test_every_network_steps(name: str) -> None:
    """Its small form; the large one has the same records of another size."""
    workload = SMALL[name]
    model, (inputs, labels) = workload.build(), workload.data(2, torch.device("cpu"))
    assert model.losses(model.module(inputs), labels).shape == (2,)
    assert model.parameter_count > 0 and OF_LIBRARIES[name].name == name


def test_without_a_gpu_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    with pytest.raises(BadParameter, match="--device cpu --small"):
        gpu.main()

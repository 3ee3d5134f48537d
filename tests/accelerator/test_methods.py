"""Every method on the simulated accelerator: it ends where the CPU does, and is resumed bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from algorithms.core.method import Algorithm
from algorithms.methods import CATALOGUE
from tests.support import bench
from tests.support.bench import OneLook, StoppedError

CPU = torch.device("cpu")
MODEL = bench.small_model("logistic", classes=2)


def asked(name: str, **settings: Any) -> Algorithm[Any]:
    """A method of two or three steps, with Adam where it takes an optimizer."""
    fields = vars(CATALOGUE[name])["__dataclass_fields__"]
    adam = {"optimizer": "adam", "averaging": "ema", "momentum": 0.9, "learning_rate": 0.1}
    settings = {"steps": 3, "update": adam} | settings
    return bench.algorithm(name, **{key: value for key, value in settings.items() if key in fields})


def trained(
    method: Algorithm[Any], device: torch.device, folder: Path, *, stop_after: int | None = None
) -> Tensor:
    plan = bench.planned(method, MODEL, accountant="rdp")
    state, _, _ = bench.trained(
        method,
        plan,
        MODEL,
        folder,
        records=lambda: bench.made_up(classes=2),
        compute=OneLook(device, number=bench.RECORDS),
        stop_after=stop_after,
    )
    return method.released(state)


@pytest.mark.parametrize("name", list(CATALOGUE))
def test_a_method_ends_where_the_cpu_does_and_is_resumed_bit_for_bit(
    name: str, sim: torch.device, tmp_path: Path
) -> None:
    method = asked(name)
    expected = trained(method, CPU, tmp_path / "cpu")
    released = trained(method, sim, tmp_path / "sim")
    assert released.device.type == "sim"
    torch.testing.assert_close(released.cpu(), expected, rtol=0, atol=1e-6)
    with pytest.raises(StoppedError):
        trained(method, sim, tmp_path / "resumed", stop_after=1)
    assert torch.equal(trained(method, sim, tmp_path / "resumed").cpu(), released.cpu())

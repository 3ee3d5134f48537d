"""Prints the functions from `Barrier.gradient` to its innermost matrix product: `python -m benchmarks.gradient_stack`.

They are those of the product on the stack in a step of softmax regression: what a reader has to open to find where
gradients are multiplied. Passes of the first steps are recorded, those of later ones replayed, so both are traced.
"""

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._python_dispatch import TorchDispatchMode

from algorithms import models
from algorithms.gradients import L2
from algorithms.privacy.accounting import Budget
from algorithms.privacy.accounting.filters import RenyiFilter
from algorithms.privacy.barrier.barrier import Barrier
from algorithms.privacy.barrier.trace import Trace
from algorithms.privacy.mechanisms.noise import seeded_generator
from algorithms.privacy.mechanisms.release import Gaussian
from algorithms.privacy.mechanisms.sampling import Poisson

Stack = list[tuple[str, str]]
"""Files and functions, outermost first."""

_STEPS = {"recorded": 1, "replayed": 1000}
"""After how many further steps a pass is such a one."""
_PRODUCT = Path(models.__file__).parents[2]


@dataclass(frozen=True)
class Records:
    """Records for a barrier: features [n, d], labels [n]."""

    features: NDArray[np.float32]
    labels: NDArray[np.int64]


class ProductStacks(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds the product's functions on the stack to a list, at each matrix product."""

    def __init__(self, stacks: list[Stack]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.stacks = stacks

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if re.search(r"mm|mv|dot", str(operation)):
            self.stacks.append(stack_in_product())
        return operation(*args, **(kwargs or {}))


def stack_in_product() -> Stack:
    """The product's functions on the stack; neither this file's nor the frames of comprehensions."""
    frame, stack = sys._getframe(), []
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(_PRODUCT / "algorithms") and not frame.f_code.co_name.startswith("<"):
            stack.append((file.relative_to(_PRODUCT).as_posix(), frame.f_code.co_name))
        frame = frame.f_back  # type: ignore[assignment]
    return stack[::-1]


def innermost_products() -> dict[str, Stack]:
    """The functions from `Barrier.gradient` to its innermost matrix product, both included, by the kind of the pass."""
    records = Records(np.ones((64, 20), dtype=np.float32), np.arange(64) % 3)
    model = models.build("softmax", input_shape=(20,), classes=3, seed=0)
    barrier = Barrier(
        records,
        model,
        privacy_filter=RenyiFilter(8.0, Budget(10.0, 1e-5)),
        generator=seeded_generator(0),
        delta=1e-5,
        trace=Trace(),
    )

    def step() -> None:
        barrier.gradient(
            model.initial_parameters(),
            sampling=Poisson(0.5),
            clipping=L2(1.0),
            noise=Gaussian(100.0),
            divisor=32.0,
        )

    deepest = {}
    for kind, before in _STEPS.items():
        for _ in range(before):
            step()
        stacks: list[Stack] = []
        with ProductStacks(stacks):
            step()
        deepest[kind] = max(stacks, key=len)
    return deepest


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.stdout.write(json.dumps(innermost_products(), indent=1) + "\n")

"""Tests public architectures in the engine and writes benchmarks/results/zoo.md:
`python -m benchmarks.zoo [NAMES] [--at BATCHES]`.

A row gives whether the model is accepted, the records per pass, what is materialised for each record for want of a
rule, the error of the clipped sum against a loop over records, and the cost of a step relative to plain PyTorch and to
Opacus's best mode that accepts the model. Times are medians of CPU time on one thread, with methods alternating; short
steps are repeated, as in training. Sizes are tiny, so that calls weigh more than products. Memory is what the
inspection adds to the process's peak size.

`--at 8,16,32` prints instead the speeds in steps of so many records, relative to plain PyTorch and to Opacus, in
engines that expect these numbers: quotients of the shortest of many rounds, for machines that do other work, too.
"""

import argparse
import resource
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from algorithms.gradients import L2, Engine
from algorithms.models import Model
from algorithms.models.libraries import imported_library
from benchmarks.architectures import ZOO, Architecture, losses
from benchmarks.machine import describe
from benchmarks.measure import Plan, Timed, alternate

BATCH, SMALL_BATCH, COMPARED = 64, 16, 6
ROUNDS, MANY_ROUNDS = 5, 9
DOCUMENT = Path(__file__).parent / "results" / "zoo.md"
MODES = ("hooks", "ghost")

HEAD = """# The zoo: each architecture, small batches and sizes of use

[The page of the zoo](../../docs/zoo.md) has the results in short.

Made by `python -m benchmarks.zoo`, with random weights at tiny sizes (`benchmarks/architectures.py`). "Records a
pass" is the physical batch, and that of an engine that expects {small} records, of which Poisson samples are often
larger, after the smaller sizes in which records have the same bits. "By record" lists operations without a rule; only
for the parameters that these use is a gradient materialised for each record. "Error" is the relative error of the
clipped sum against a loop over {compared} records, in 32 bits. "Of plain" and "of Opacus" compare our speed in a
clipped step of {batch} records with plain PyTorch's, and with that of the best mode of Opacus (hooks or ghost
clipping) that accepts the model: 0.5 is half as fast; "at {small}" the same for {small} records, in the second
engine. "Look" is the inspection of the model when the engine is made, before the first step, in seconds of one CPU
and MB of memory. The last {others} rows were added after the rules had been written. All were measured on {day}, on
one thread of an {cpu}.

| architecture | parameters | path | records a pass | by record | error | of plain | of Opacus | of plain at {small} |\
 of Opacus at {small} | look, s | look, MB |
|---|---|---|---|---|---|---|---|---|---|---|---|
"""


def main(arguments: list[str]) -> None:
    """Print the rows of the named architectures, or of all, which are then written unless batches are given."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.zoo")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--at", type=lambda text: [int(batch) for batch in text.split(",")], default=[])
    settings = parser.parse_args(arguments)
    names, batches = settings.names, settings.at
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    imported_library("transformers").logging.set_verbosity_error()
    rows = []
    for name, architecture in ZOO.items():
        if not names or any(part.lower() in name.lower() for part in names):
            rows.append(row_of_batches(name, architecture, batches) if batches else row(name, architecture))
            sys.stdout.write(rows[-1] + "\n")
            sys.stdout.flush()
    if not names and not batches:
        others = sum(not architecture.is_listed for architecture in ZOO.values())
        _, mark, below = DOCUMENT.read_text().partition("\n## ")  # keep what was not made here
        cpu = describe(torch.device("cpu"))["cpu"]
        head = HEAD.format(
            compared=COMPARED, batch=BATCH, small=SMALL_BATCH, others=others, day=date.today(), cpu=cpu
        )
        DOCUMENT.write_text(head + "\n".join(rows) + "\n" + mark + below)


def row(name: str, architecture: Architecture) -> str:
    """One row of the table."""
    torch.manual_seed(0)
    model = _model(name, architecture)
    inputs, labels = architecture.inputs(BATCH), torch.arange(BATCH) % 3
    before, start = _megabytes(), time.process_time()
    try:
        engine = Engine(model, input_shape=architecture.shape, input_dtype=inputs.dtype)
    except ValueError as refused:
        return f"| {name} | {model.parameter_count:,} | refused: {refused} | | | | | | | | | |"
    inspection, grown = time.process_time() - start, _megabytes() - before
    small = Engine(
        model, input_shape=architecture.shape, input_dtype=inputs.dtype, expected_batch=float(SMALL_BATCH)
    )
    cells = (
        f"{model.parameter_count:,}",
        "batched" if engine.is_batched else "record by record",
        f"{engine.physical_batch}, {'/'.join(map(str, (*small.smaller_sizes, small.physical_batch)))}",
        ", ".join(engine.operations_without_rule) or "-",
        f"{error(model, engine, inputs[:COMPARED], labels[:COMPARED]):.0e}",
        *speeds(architecture, model, engine, BATCH),
        *speeds(architecture, model, small, SMALL_BATCH),
        f"{inspection:.1f}",
        f"{max(0.0, grown):.0f}",
    )
    return "| " + " | ".join((name, *cells)) + " |"


def row_of_batches(name: str, architecture: Architecture, batches: Sequence[int]) -> str:
    """The speeds of steps of each of these numbers of records, in an engine that expects it."""
    torch.manual_seed(0)
    model, dtype = _model(name, architecture), architecture.inputs(1).dtype
    cells = [name]
    for batch in batches:
        engine = Engine(model, input_shape=architecture.shape, input_dtype=dtype, expected_batch=float(batch))
        cells += speeds(architecture, model, engine, batch, rounds=MANY_ROUNDS, summary=min)
    return "| " + " | ".join(cells) + " |"


def _model(name: str, architecture: Architecture) -> Model:
    return Model(name, architecture.make(), losses, lambda outputs: outputs)


def speeds(
    architecture: Architecture,
    model: Model,
    engine: Engine,
    batch: int,
    *,
    rounds: int = ROUNDS,
    summary: Callable[[list[float]], float] = statistics.median,
) -> tuple[str, str]:
    """The speed of a step of so many records over that of plain PyTorch, and over that of Opacus's best mode."""
    inputs, labels = architecture.inputs(batch), torch.arange(batch) % 3
    point, clipping = model.initial_parameters(), L2(1.0)
    steps: dict[str, Callable[[], object]] = {
        "ours": lambda: engine.clipped_sum(point, inputs, labels, clipping),
        "plain": _plain(architecture, inputs, labels),
    }
    for mode in MODES:
        step = _opacus(architecture, mode, inputs, labels)
        if step is not None:
            steps[mode] = step
    seconds = alternate(
        {name: Timed(step) for name, step in steps.items()},
        Plan(rounds=rounds, warmup=1, repeat=True),
        time.process_time,
    )
    times = {name: summary(each) for name, each in seconds.items()}
    best = min((times[mode] for mode in MODES if mode in times), default=None)
    return (
        f"{times['plain'] / times['ours']:.2f}",
        "-" if best is None else f"{best / times['ours']:.1f}",
    )


def error(model: Model, engine: Engine, inputs: Tensor, labels: Tensor) -> float:
    """Relative error of the clipped sum against a loop, clipped at the median norm."""
    point, rows = model.initial_parameters(), []
    for one, label in zip(torch.split(inputs, 1), torch.split(labels, 1), strict=True):
        start = point.clone().requires_grad_()
        loss = model.losses(model.outputs(model.by_name(start), one), label)
        rows.append(torch.autograd.grad(loss.sum(), start)[0])
    gradients = torch.stack(rows).double()
    norms = gradients.norm(dim=1)
    bound = float(norms.median())
    expected = (gradients * (bound / norms).clamp(max=1.0)[:, None]).sum(dim=0)
    clipped = engine.clipped_sum(point, inputs, labels, L2(bound))
    return float((clipped - expected).norm() / expected.norm())


def _plain(architecture: Architecture, inputs: Tensor, labels: Tensor) -> Callable[[], object]:
    module = architecture.make()
    parts = [part for part in module.parameters() if part.requires_grad]

    def step() -> object:
        return torch.autograd.grad(losses(module(inputs), labels).mean(), parts, allow_unused=True)

    return step


class _Criterion:
    """Losses with the `reduction` that Opacus switches."""

    reduction = "mean"

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        each_loss = losses(outputs, labels)
        return each_loss if self.reduction == "none" else each_loss.mean()


def _opacus(
    architecture: Architecture, mode: str, inputs: Tensor, labels: Tensor
) -> Callable[[], object] | None:
    """A step of Opacus in one of its modes without noise; None if it does not accept the model."""
    from opacus import PrivacyEngine
    from torch.utils.data import DataLoader, TensorDataset

    module: nn.Module = architecture.make().train()
    parts = [part for part in module.parameters() if part.requires_grad]
    try:
        module, optimizer, *rest = PrivacyEngine(secure_mode=False).make_private(
            module=module,
            optimizer=torch.optim.SGD(parts, lr=0.0),
            criterion=_Criterion(),
            data_loader=DataLoader(TensorDataset(inputs, labels), batch_size=len(labels)),
            noise_multiplier=0.0,
            max_grad_norm=1.0,
            poisson_sampling=False,
            grad_sample_mode=mode,
        )
        criterion: Any = rest[0] if mode == "ghost" else _Criterion()

        def step() -> object:
            optimizer.zero_grad(set_to_none=True)
            criterion(module(inputs), labels).backward()
            return optimizer.step()

        step()
    except Exception:  # it rejects models with errors of any kind
        return None
    return step


def _megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


if __name__ == "__main__":
    main(sys.argv[1:])

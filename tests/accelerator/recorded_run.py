"""A short run on the simulated accelerator, with what the device did in each of its steps."""

import functools
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from algorithms.core import training
from algorithms.methods import CATALOGUE
from algorithms.privacy.barrier.barrier import Barrier
from algorithms.privacy.mechanisms.noise import seeded_generator
from tests.accelerator import simulator
from tests.accelerator.simulator import Event, Events
from tests.support import bench
from tests.support.bench import OneLook

CANARY = np.float32(12345.678)
"""The first number of each record."""
STREAMED, PASS, SHORT = 20_000, 256, 4
"""So many records do not fit into a megabyte. A step takes several passes, of SHORT where the records fit."""

ON_THE_HOST = ("objective_perturbation", "output_perturbation", "lbfgs")
"""Methods whose minimum the host computes."""
OF_TWO_CLASSES = ("dp_agd", "priv_gene", "objective_perturbation", "output_perturbation", "lbfgs")


@contextmanager
def charges_marked(events: Events) -> Iterator[None]:
    """Add an event after each charge of a barrier, and one after each answer."""

    def marking(method: Callable[..., Any], kind: str) -> Callable[..., Any]:
        @functools.wraps(method)
        def marked(*args: Any, **kwargs: Any) -> Any:
            answer = method(*args, **kwargs)
            events.all.append(Event(kind))
            return answer

        return marked

    queries = [name for name, part in vars(Barrier).items() if callable(part) and not name.startswith("_")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Barrier, "_Barrier__charge", marking(vars(Barrier)["_Barrier__charge"], "charge"))
        for name in queries:
            patch.setattr(Barrier, name, marking(vars(Barrier)[name], "answer"))
        yield


@dataclass(frozen=True)
class Recorded:
    """What a run released, and what the device did in it and in each of its steps."""

    released: Tensor
    events: Events
    steps: list[Events]

    @property
    def step(self) -> Events:
        """The second step; of a single one what follows its charge, since the model is inspected before."""
        if len(self.steps) > 1:
            return self.steps[1]
        kinds = [event.kind for event in self.events.all]
        return Events(self.events.all[kinds.index("charge") :])

    def copies_of_records(self) -> list[bool]:
        """For each copy of records to the device: whether its release was charged, and not yet answered."""
        is_charged, copies = False, []
        for event in self.events.all:
            if event.kind in ("charge", "answer"):
                is_charged = event.kind == "charge"
            elif event.tensor is not None and bool(torch.eq(event.tensor, float(CANARY)).any()):
                copies.append(is_charged)
        return copies


def record(name: str, *, streamed: bool = False, device: str = "sim") -> Recorded:
    count = STREAMED if streamed else bench.RECORDS
    classes = 2 if name in OF_TWO_CLASSES else bench.CLASSES
    made = bench.made_up(count, classes=classes)
    made.features[:, 0, 0, 0] = CANARY
    model = bench.small_model("logistic" if classes == 2 else "softmax", classes=classes)
    fields = vars(CATALOGUE[name])["__dataclass_fields__"]
    settings = {"steps": 3, "rounds": 3, "expected_batch_size": 2_000 if streamed else 10}
    method = bench.algorithm(name, **{key: value for key, value in settings.items() if key in fields})
    ends: list[int] = []
    with simulator.recorded() as events, charges_marked(events), tempfile.TemporaryDirectory() as folder:
        state, _, _ = training.train(
            method,
            bench.planned(method, model, records=count, accountant="rdp"),
            model,
            open_records=lambda: made,
            run=training.ResumableRun(run_id="one run", generator=seeded_generator(3), folder=Path(folder)),
            compute=OneLook(
                torch.device(device), memory_mb=1, physical_batch=PASS if streamed else SHORT, number=count
            ),
            hooks=training.Hooks(on_step=lambda *_: ends.append(len(events.all))),
        )
    starts = [0, *ends]
    steps = [Events(events.all[start:end]) for start, end in zip(starts, ends, strict=False)]
    return Recorded(method.released(state).cpu(), events, steps)


recorded = functools.cache(record)

SUM = {"unnoised_queries._sum_on_device": 1}

"""The scores of made-up held-out records by a model that was trained on others, with seeded noise."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from algorithms.core.training import ResumableRun, train
from algorithms.privacy.accounting.filters import CostCurve
from algorithms.privacy.barrier.barrier import ComputeConfig
from algorithms.privacy.mechanisms.noise import seeded_generator
from tests.support.bench import MadeUp


def held_out_scores(
    method: Any,
    plan: Any,
    model: Any,
    records: MadeUp,
    held_out: NDArray[Any],
    *,
    seed: int,
    physical_batch: int,
    features: Any = None,
) -> NDArray[np.float32]:
    """Train by a plan on `records`; returns the scores of `held_out`, a row a record.

    What has been spent so far is not priced, as a trace alone says it.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CostCurve, "after", lambda *_: 0.0)
        state, _, model = train(
            method,
            plan,
            model,
            open_records=lambda: records,
            run=ResumableRun(
                run_id="0" * 64, generator=seeded_generator(seed), folder=Path("there is no checkpoint")
            ),
            compute=ComputeConfig(torch.device("cpu"), physical_batch=physical_batch),
            features=features,
        )
    outputs = model.outputs(model.by_name(method.released(state)), torch.from_numpy(held_out))
    scores: NDArray[np.float32] = model.scores(outputs).numpy()
    return scores

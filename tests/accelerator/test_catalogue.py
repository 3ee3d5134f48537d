"""Each model of the catalogue on the simulated accelerator, in 32 bits and in bfloat16: it is trained as on the CPU."""

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from algorithms.core.plan import Target
from algorithms.core.planning_facts import PlanningFacts
from algorithms.models import CATALOGUE, Model, build
from algorithms.models.cells import behind_cells
from algorithms.privacy.accounting import Budget
from algorithms.privacy.barrier.compute_config import ComputeConfig
from tests.support import bench
from tests.support.bench import MadeUp
from tests.support.soak import soak_but

CPU = torch.device("cpu")
RECORDS, WORDS = 24, 11
TINY = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
BERT = {"model_type": "bert", "vocab_size": WORDS, "max_position_embeddings": 8, **TINY}
LORA = {"config": BERT, "adapter": {"rank": 2}}
VIT = {
    "architecture": "vit_tiny_patch16_224",
    "options": {"img_size": 32, "depth": 1, "embed_dim": 24, "num_heads": 2},
}
SPECS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "softmax": ((1, 4, 4), {}),
    "linear": ((6,), {}),
    "additive": ((6,), {}),
    "logistic": ((6,), {}),
    "logistic_through_origin": ((6,), {}),
    "svm": ((6,), {}),
    "huber_svm": ((6,), {}),
    "tanh_cnn": ((1, 20, 20), {}),
    "relu_cnn": ((1, 20, 20), {}),
    "cifar_cnn": ((3, 8, 8), {}),
    "cifar_tanh_cnn": ((3, 8, 8), {}),
    "conv_fc": ((1, 4, 4), {}),
    "mlp": ((6,), {}),
    "unit_linear": ((6,), {}),
    "scatter_linear": ((81, 4, 4), {}),
    "scatter_cnn": ((81, 8, 8), {}),
    "bilstm": ((5,), {}),
    "timm": ((3, 32, 32), VIT),
    "huggingface": ((5,), LORA),
}
"""For each model the shape of a record, and settings."""
OUTPUTS = {"linear": 1} | dict.fromkeys(("logistic", "logistic_through_origin", "svm", "huber_svm"), 2)


def made(name: str, precision: str) -> tuple[Model, MadeUp]:
    """A model of the catalogue, an additive one behind cells, and records for it."""
    shape, settings = SPECS[name]
    draw, outputs = np.random.default_rng(0), OUTPUTS.get(name, 3)
    takes_tokens = CATALOGUE[name].takes_tokens
    model = build(
        name,
        input_shape=shape,
        classes=outputs,
        seed=1,
        precision=precision,
        tokens=WORDS if takes_tokens else None,
        settings=settings,
    )
    features = (
        draw.integers(1, WORDS, (RECORDS, *shape)) if takes_tokens else draw.normal(size=(RECORDS, *shape))
    )
    if name == "additive":
        model = behind_cells(model, (2, 4), (0.6, 0.8))
        features = np.stack([draw.integers(0, 2, RECORDS), draw.integers(0, 4, RECORDS)], axis=1)
    labels = draw.normal(size=RECORDS).clip(-1, 1) if name == "linear" else draw.integers(0, outputs, RECORDS)
    kind = np.int64 if takes_tokens else np.float32
    return model, MadeUp(features.astype(kind), labels.astype(np.float32 if name == "linear" else np.int64))


@cache
def trained(name: str, device: torch.device, precision: str = "float32") -> Tensor:
    model, records = made(name, precision)
    method = bench.algorithm("dp_sgd", steps=2, update={"learning_rate": 0.1})
    facts = PlanningFacts(
        records=RECORDS,
        parameters=model.parameter_count,
        layers=len(model.layers),
        classes=OUTPUTS.get(name, 3),
    )
    with tempfile.TemporaryDirectory() as folder:
        state, _, _ = bench.trained(
            method,
            method.plan(Target(Budget(5.0, bench.DELTA), "rdp"), facts),
            model,
            Path(folder),
            records=lambda: records,
            compute=ComputeConfig(device, physical_batch=16, number=RECORDS),
        )
    return method.released(state).cpu()


CHOSEN = ["additive", "linear", "huber_svm", "tanh_cnn", "unit_linear", "scatter_linear"]
"""One of each kind of layer and loss; a transformer with adapters is among `test_models`."""


@pytest.mark.parametrize("name", soak_but(CHOSEN, CATALOGUE))
def test_a_model_of_the_catalogue_ends_where_the_cpu_does(name: str, sim: torch.device) -> None:
    torch.testing.assert_close(trained(name, sim), trained(name, CPU), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", soak_but(["mlp", "tanh_cnn"], ["mlp", "tanh_cnn", "huggingface"]))
def test_in_bfloat16_too(name: str, sim: torch.device) -> None:
    expected = trained(name, CPU, "bfloat16")
    torch.testing.assert_close(trained(name, sim, "bfloat16"), expected, rtol=0, atol=1e-3)
    assert not torch.equal(expected, trained(name, CPU))

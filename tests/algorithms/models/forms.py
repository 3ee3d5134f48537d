"""A tiny problem for every model of the catalogue, for tests."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from algorithms.models import Model, build


class Form(NamedTuple):
    """What a model is built for in tests: small, to be fast."""

    shape: tuple[int, ...]
    classes: int = 3
    tokens: int | None = None
    settings: dict[str, Any] = {}  # noqa: RUF012 - not changed


TINY_VIT = {"img_size": 8, "patch_size": 4, "embed_dim": 12, "depth": 1, "num_heads": 2}
TINY_BERT = {
    "model_type": "bert",
    "vocab_size": 9,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "max_position_embeddings": 4,
}
LORA = {"kind": "lora", "rank": 2, "alpha": 4.0, "targets": ["query", "value"]}

FORMS = {
    "softmax": Form((1, 5, 5)),
    "linear": Form((7,), 1),
    "additive": Form((7,), 2),
    "logistic": Form((7,), 2),
    "logistic_through_origin": Form((7,), 2),
    "svm": Form((7,), 2),
    "huber_svm": Form((7,), 2),
    "tanh_cnn": Form((1, 20, 20)),
    "relu_cnn": Form((1, 20, 20)),
    "cifar_cnn": Form((3, 8, 8)),
    "cifar_tanh_cnn": Form((3, 8, 8)),
    "conv_fc": Form((2, 4, 4)),
    "mlp": Form((6,), settings={"hidden": 5}),
    "unit_linear": Form((2, 3)),
    "scatter_linear": Form((6, 2, 2), settings={"groups": 3}),
    "scatter_cnn": Form((81, 3, 2)),
    "bilstm": Form((4,), 2, tokens=9, settings={"width": 6}),
    "timm": Form((3, 8, 8), settings={"architecture": "vit_tiny_patch16_224", "options": TINY_VIT}),
    "huggingface": Form((4,), 2, tokens=9, settings={"config": TINY_BERT}),
}


def form_of(name: str, seed: int = 0, **settings: Any) -> Model:
    """The model of a name for its tiny problem."""
    shape, classes, tokens, own = FORMS[name]
    return build(name, input_shape=shape, classes=classes, seed=seed, tokens=tokens, settings=own | settings)


def records(form: Form, count: int = 5, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Made-up records of a form: inputs and labels."""
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, form.classes, (count,), generator=draw)
    if form.tokens is not None:
        return torch.randint(0, form.tokens, (count, *form.shape), generator=draw, dtype=torch.int32), labels
    return torch.randn(count, *form.shape, generator=draw), labels


def moved(model: Model, seed: int = 2) -> Tensor:
    """A point near a model's start."""
    start = model.initial_parameters()
    return start + 0.1 * torch.randn(len(start), generator=torch.Generator().manual_seed(seed))

"""Architectures that nobody here wrote: taken in passes of many records, with the sums of the loop."""

import pytest
import torch

from algorithms.gradients import L2, Engine
from algorithms.models import Model
from algorithms.models.libraries import LibraryMissingError, imported_library
from benchmarks.architectures import LARGE, ZOO, losses
from tests.support.gradients import naive

try:
    for library in ("timm", "transformers", "peft"):
        imported_library(library)
except LibraryMissingError as missing:
    pytest.skip(str(missing), allow_module_level=True)

RELATED = {
    "BERT": ("DistilBERT", "RoBERTa", "ELECTRA", "MPNet"),
    "Llama": ("Mistral", "Gemma", "Qwen2"),
    "GPT-2": ("OPT", "GPT-NeoX", "GPT-2, gradient checkpointing", "LoRA on GPT-2"),
    "ViT (timm)": (
        "ViT (transformers)",
        "DeiT, distilled (timm)",
        "BEiT (transformers)",
        "DINOv2",
        "CaiT (timm)",
    ),
    "ResNet-26 (timm)": ("Wide ResNet (timm)",),
    "ConvNeXt (timm)": ("ConvNeXtV2 (timm)",),
    "EfficientNet (torchvision)": ("MobileNetV2 (torchvision)",),
    "LSTM tagger": ("GRU tagger", "RNN tagger"),
    "embedding bag, mean": ("embedding bag, sum",),
}
"""Architectures of the same parts as another one, which `make soak` takes too."""
SOAK = [name for family in RELATED.values() for name in family]
NAMES = [name for name in ZOO if name not in (*LARGE, *SOAK)]


@pytest.mark.parametrize("name", [*NAMES, *(pytest.param(name, marks=pytest.mark.soak) for name in SOAK)])
def test_a_public_architecture_is_taken_in_passes_of_many_records(name: str) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Model(name, ZOO[name].make(), losses, lambda outputs: outputs)
    inputs, labels = ZOO[name].inputs(4), torch.arange(4) % 3
    engine = Engine(model, input_shape=ZOO[name].shape, input_dtype=inputs.dtype)
    assert engine.is_batched and engine.physical_batch >= 32
    point = model.initial_parameters()
    gradients = naive.loop(model, point, inputs, labels)
    clipping = L2(float(gradients.norm(dim=1).median()))
    expected = naive.contributions(model, gradients, clipping).sum(dim=0)
    assert naive.relative(engine.clipped_sum(point, inputs, labels, clipping), expected) < 5e-5

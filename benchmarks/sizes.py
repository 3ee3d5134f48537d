"""Steps of models at the sizes of their papers, at reduced depth, beside plain PyTorch: `python -m benchmarks.sizes`.

The zoo's models are tiny, so that calls weigh more than products; here products do. A row has the CPU time of a step
of 64 records on one thread, ours and plain PyTorch's in alternation (medians), and by how much each grows the process.
Lines go to the standard output; benchmarks/results/zoo.md has them as a table.
"""

import ctypes
import gc
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.rnn import pack_padded_sequence

from algorithms.gradients import L2, Engine
from algorithms.models import Model
from algorithms.models.libraries import imported_library
from benchmarks.architectures import Text, Wired, losses, timm, torchvision
from benchmarks.measure import Plan, Timed, alternate

BATCH, ROUNDS, CLASSES, WIDTH, WORDS = 64, 5, 3, 128, 1000
STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def attention(length: int) -> nn.Module:
    """A trained query of this many rows that attends to what records hold: attention pooling, or a Perceiver's."""

    def wiring(self: Any, rows: Tensor) -> Tensor:
        seen, query = self.first(rows), self.query.expand(len(rows), -1, -1)
        outputs: Tensor = self.last(self.cross(query, seen, seen, need_weights=False)[0].mean(dim=1))
        return outputs

    return Wired(
        wiring,
        first=nn.Linear(32, WIDTH),
        query=nn.Parameter(torch.randn(1, length, WIDTH)),
        cross=nn.MultiheadAttention(WIDTH, 4, batch_first=True),
        last=nn.Linear(WIDTH, CLASSES),
    )


def decoder() -> nn.Module:
    """PyTorch's own transformer decoder, over half of what it attends to."""
    layer = nn.TransformerDecoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)

    def wiring(self: Any, rows: Tensor) -> Tensor:
        seen = self.first(rows)
        outputs: Tensor = self.last(self.decoder(seen[:, :32], seen).mean(dim=1))
        return outputs

    parts = {"first": nn.Linear(32, WIDTH), "last": nn.Linear(WIDTH, CLASSES)}
    return Wired(wiring, decoder=nn.TransformerDecoder(layer, 2), **parts)


def siglip() -> nn.Module:
    """The vision encoder of SigLIP, of which the pooling head alone is trained."""
    library = imported_library("transformers")
    config = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 2, "num_attention_heads": 6}
    model = library.SiglipVisionModel(library.SiglipVisionConfig(image_size=64, patch_size=8, **config))
    model.requires_grad_(False)
    getattr(model, "vision_model", model).head.requires_grad_(True)
    return Wired(
        lambda self, images: self.last(self.model(pixel_values=images).pooler_output),
        model=model,
        last=nn.Linear(384, CLASSES),
    )


def packed(kind: type[nn.GRU] | type[nn.LSTM]) -> nn.Module:
    """A recurrent network on packed texts."""

    def wiring(self: Any, words: Tensor) -> Tensor:
        lengths = (words != 0).sum(dim=1).clamp(min=1).cpu()
        texts = pack_padded_sequence(self.table(words), lengths, batch_first=True, enforce_sorted=False)
        ends = self.layers(texts)[1]
        outputs: Tensor = self.last((ends[0] if isinstance(ends, tuple) else ends)[-1])
        return outputs

    layers = {"layers": kind(64, 64, batch_first=True), "last": nn.Linear(64, CLASSES)}
    return Wired(wiring, table=nn.Embedding(WORDS, 64, padding_idx=0), **layers)


def tagger() -> nn.Module:
    """An LSTM in both directions on a frozen table."""

    def wiring(self: Any, words: Tensor) -> Tensor:
        outputs: Tensor = self.last(self.layers(torch.relu(self.first(self.table(words))))[0].amax(dim=1))
        return outputs

    return Wired(
        wiring,
        table=nn.Embedding(WORDS, 100).requires_grad_(False),
        first=nn.Linear(100, 32),
        layers=nn.LSTM(32, 32, bidirectional=True, batch_first=True),
        last=nn.Linear(64, CLASSES),
    )


class Member(nn.Module):
    """A linear layer that 16 members of an ensemble share but for their scales and biases (TabM)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5)
        self.before, self.after = (nn.Parameter(torch.ones(16, size)) for size in (inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(16, outputs))

    def forward(self, rows: Tensor) -> Tensor:
        """[batch, 16, inputs] -> [batch, 16, outputs]."""
        return functional.linear(rows * self.before, self.weight) * self.after + self.bias


def ensemble() -> nn.Module:
    """TabM (Gorishniy et al. 2025)."""

    def wiring(self: Any, rows: Tensor) -> Tensor:
        hidden = self.layers(rows[:, None].expand(-1, 16, -1))
        outputs: Tensor = torch.einsum("bki,kio->bko", hidden, self.heads).mean(dim=1)
        return outputs

    layers = [nn.Sequential(Member(size, 256), nn.ReLU()) for size in (20, 256, 256)]
    return Wired(
        wiring, layers=nn.Sequential(*layers), heads=nn.Parameter(torch.randn(16, 256, CLASSES) / 16)
    )


def deberta(*, masked: bool) -> nn.Module:
    """DeBERTa-v2 for classification, with or without a mask."""
    library = imported_library("transformers")
    settings = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4, "num_labels": CLASSES}
    settings |= {"intermediate_size": 4 * WIDTH, "max_position_embeddings": 128, "position_buckets": 32}
    still = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "pooler_dropout"), 0.0)
    relative = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False}
    config = library.DebertaV2Config(vocab_size=WORDS, pad_token_id=0, **settings, **still, **relative)
    return Text(library.DebertaV2ForSequenceClassification(config), masked=masked)


def table_transformer() -> nn.Module:
    """TabTransformer (Huang et al. 2020): eight columns of categories and six numbers."""

    def wiring(self: Any, rows: Tensor) -> Tensor:
        codes = rows[:, :8].abs().mul(3).long().clamp(0, 9) + 10 * torch.arange(8)
        hidden = self.encoder(self.table(codes)).flatten(1)
        outputs: Tensor = self.last(torch.cat([hidden, self.norm(rows[:, 8:])], dim=1))
        return outputs

    layer = nn.TransformerEncoderLayer(32, 8, 128, dropout=0.0, batch_first=True)
    return Wired(
        wiring,
        table=nn.Embedding(80, 32),
        encoder=nn.TransformerEncoder(layer, 6, enable_nested_tensor=False),
        norm=nn.LayerNorm(6),
        last=nn.Sequential(nn.Linear(262, 256), nn.ReLU(), nn.Linear(256, CLASSES)),
    )


def temporal() -> nn.Module:
    """A temporal convolutional network (Bai et al. 2018) without skips: dilated and with weight normalisation."""
    layers: list[nn.Module] = []
    for inputs, dilation in ((8, 1), (64, 1), (64, 2), (64, 2), (64, 4), (64, 4)):
        layers += [nn.ConstantPad1d((2 * dilation, 0), 0.0)]
        layers += [weight_norm(nn.Conv1d(inputs, 64, 3, dilation=dilation)), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(64, CLASSES))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "attention pooling, nn.MultiheadAttention": (lambda: attention(1), (64, 32)),
    "Perceiver's cross-attention": (lambda: attention(16), (128, 32)),
    "nn.TransformerDecoder": (decoder, (64, 32)),
    "NF-ResNet-26, a quarter wide": (timm("nf_resnet26", width_factor=0.25), (3, 32, 32)),
    "the same, 64 pixels": (timm("nf_resnet26", width_factor=0.25), (3, 64, 64)),
    "SigLIP frozen, pooling head": (siglip, (3, 64, 64)),
    "DenseNet, GroupNorm": (
        torchvision("DenseNet", growth_rate=12, block_config=(4, 4, 4), num_init_features=24),
        (3, 32, 32),
    ),
    "GRU, packed": (lambda: packed(nn.GRU), (40,)),
    "LSTM, packed": (lambda: packed(nn.LSTM), (40,)),
    "LSTM in both directions": (tagger, (80,)),
    "TabM, 16 members": (ensemble, (20,)),
    "DeBERTa-v2, mask": (lambda: deberta(masked=True), (64,)),
    "DeBERTa-v2, no mask": (lambda: deberta(masked=False), (64,)),
    "TabTransformer": (table_transformer, (14,)),
    "temporal CNN, weight norm": (temporal, (8, 64)),
    "embedding bag, 10,000 words": (
        lambda: nn.Sequential(nn.EmbeddingBag(10_000, 64), nn.Linear(64, CLASSES)),
        (20,),
    ),
}
TEXTS = ("GRU", "LSTM", "DeBERTa", "embedding")


def main(names: list[str]) -> None:
    """Print a row for each of the named models, or of all."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    imported_library("transformers").logging.set_verbosity_error()
    for name in MODELS:
        if not names or any(part.lower() in name.lower() for part in names):
            sys.stdout.write(row(name) + "\n")
            sys.stdout.flush()


def row(name: str) -> str:
    """One row: both times in ms, our speed over plain PyTorch's, both growths in MB."""
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model, module = Model(name, make(), losses, lambda outputs: outputs), make()
    inputs, labels = _records(name, shape), torch.arange(BATCH) % CLASSES
    engine = Engine(model, input_shape=shape, input_dtype=inputs.dtype, memory_mb=2048)
    point, trained = model.initial_parameters(), [part for part in module.parameters() if part.requires_grad]

    def plain() -> object:
        return torch.autograd.grad(losses(module(inputs), labels).mean(), trained, allow_unused=True)

    steps = {"plain": plain, "ours": lambda: engine.clipped_sum(point, inputs, labels, L2(1.0))}
    timed = {key: Timed(step) for key, step in steps.items()}
    rounds = alternate(timed, Plan(rounds=ROUNDS, warmup=1, repeat=True), time.process_time)
    ours, other = (1e3 * statistics.median(rounds[key]) for key in ("ours", "plain"))
    grown = [growth(steps[key]) for key in ("plain", "ours")]
    path = "" if engine.is_batched else " (record by record)"
    cells = (
        name + path,
        f"{other:.1f}",
        f"{ours:.1f}",
        f"{other / ours:.2f}",
        *(f"{each:.0f}" for each in grown),
    )
    return "| " + " | ".join(cells) + " |"


def _records(name: str, shape: tuple[int, ...]) -> Tensor:
    draw = torch.Generator().manual_seed(0)
    if not name.startswith(TEXTS):
        return torch.randn(BATCH, *shape, generator=draw)
    words = torch.randint(3, WORDS, (BATCH, *shape), generator=draw)
    lengths = torch.randint(shape[0] // 2, shape[0] + 1, (BATCH, 1), generator=draw)
    return torch.where(torch.arange(shape[0]) < lengths, words, 0)


def growth(step: Callable[[], object]) -> float:
    """By how many MB a step makes the process grow at its peak."""
    step()
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    RESET.write_text("5")
    before = _megabytes("VmRSS")
    step()
    return _megabytes("VmHWM") - before


def _megabytes(key: str) -> float:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) / 1e3


if __name__ == "__main__":
    main(sys.argv[1:])

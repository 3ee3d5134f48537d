"""Architectures from public libraries and users' own code, at tiny sizes with random weights; nothing is loaded.

Each is built as its users build it. Images are [3, 32, 32], tokens [12] below 60 with 0 for padding, rows [9], series
[4, 24]; there are three classes. Batch normalisation is replaced by group normalisation.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.rnn import pack_padded_sequence

from algorithms.models.libraries import imported_library

WORDS, LENGTH, WIDTH, CLASSES, PADDING = 60, 12, 16, 3, 0
IMAGE, ROW, SERIES, TOKENS = (3, 32, 32), (9,), (4, 24), (LENGTH,)


@dataclass(frozen=True)
class Architecture:
    """One architecture of the zoo.

    make: builds the module. shape: of one record. is_listed: whether it was on the list to be supported; the others
    test that rules are not made for that list.
    """

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    is_listed: bool = True

    @property
    def takes_tokens(self) -> bool:
        """Whether a record is a text."""
        return self.shape == TOKENS

    def inputs(self, count: int, seed: int = 0) -> Tensor:
        """Random records; texts have different lengths and are padded."""
        draw = torch.Generator().manual_seed(seed)
        if not self.takes_tokens:
            return torch.randn(count, *self.shape, generator=draw)
        words = torch.randint(3, WORDS, (count, LENGTH), generator=draw)
        lengths = torch.randint(3, LENGTH + 1, (count, 1), generator=draw)
        return torch.where(torch.arange(LENGTH) < lengths, words, PADDING)


def losses(outputs: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of each record; for a language model, of each sequence, whose own words are predicted."""
    return functional.cross_entropy(outputs, labels, reduction="none")


class Text(nn.Module):
    """A library's model on token ids, with the padding mask that the library's data collator would give."""

    def __init__(self, model: nn.Module, *, masked: bool = True) -> None:
        super().__init__()
        self.model, self.masked = model, masked

    def forward(self, words: Tensor) -> Tensor:
        """Logits [batch, classes]."""
        mask = (words != PADDING).long() if self.masked else None
        outputs: Tensor = self.model(input_ids=words, attention_mask=mask).logits
        return outputs


class Pooled(nn.Module):
    """An encoder without a head, with mean pooling over the non-padding tokens and a linear layer."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(WIDTH, CLASSES)

    def forward(self, words: Tensor) -> Tensor:
        """Logits [batch, classes]."""
        mask = words != PADDING
        hidden = self.encoder(input_ids=words, attention_mask=mask.long()).last_hidden_state
        outputs: Tensor = self.head(
            (hidden * mask[:, :, None]).sum(dim=1) / mask.sum(dim=1, keepdim=True).clamp(min=1)
        )
        return outputs


class LanguageModel(nn.Module):
    """A language model whose next-word losses are averaged over a text, so that a record has one loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, words: Tensor) -> Tensor:
        """The text's mean next-word loss and two multiples of it as logits [batch, 3]."""
        logits = self.model(input_ids=words, attention_mask=(words != PADDING).long()).logits
        entropy = functional.cross_entropy(
            logits[:, :-1].transpose(1, 2), words[:, 1:].long(), reduction="none"
        ).mean(dim=1)
        return torch.stack([entropy, 0.5 * entropy, -entropy], dim=1)


class Logits(nn.Module):
    """The logits of a vision model of `transformers`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        """Logits [batch, classes]."""
        outputs: Tensor = self.model(pixel_values=images).logits
        return outputs


_TEXT: Mapping[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 16,
    "num_labels": CLASSES,
    "pad_token_id": PADDING,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_GPT = {"n_embd": WIDTH, "n_layer": 2, "n_head": 2, "n_positions": 16}
_NO_DROP = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def hugging(
    name: str, wrap: Callable[[nn.Module], nn.Module], kind: str, **settings: Any
) -> Callable[[], nn.Module]:
    """A model of `transformers`, by the names of its family and class; `settings` override the tiny defaults."""

    def make() -> nn.Module:
        library = imported_library("transformers")
        config = getattr(library, f"{name}Config")(**{**_TEXT, **settings})
        return wrap(getattr(library, f"{name}{kind}")(config))

    return make


def classifier(name: str, **settings: Any) -> Callable[[], nn.Module]:
    """The same with a head for text classification."""
    return hugging(name, Text, "ForSequenceClassification", **settings)


def vision(name: str, **settings: Any) -> Callable[[], nn.Module]:
    """The same for image classification."""
    settings = {"image_size": 32, "patch_size": 8, **settings}
    return hugging(name, Logits, "ForImageClassification", **settings)


def timm(name: str, **settings: Any) -> Callable[[], nn.Module]:
    """A timm model."""

    def make() -> nn.Module:
        return without_batch_norm(
            imported_library("timm").create_model(name, num_classes=CLASSES, **settings)
        )

    return make


def mixer(block: str, norm: type[nn.Module]) -> Callable[[], nn.Module]:
    """An MLP-Mixer of timm with the given kind of block."""

    def make() -> nn.Module:
        library = imported_library("timm.models.mlp_mixer")
        model: nn.Module = library.MlpMixer(
            num_classes=CLASSES,
            img_size=32,
            patch_size=8,
            embed_dim=WIDTH,
            num_blocks=2,
            block_layer=getattr(library, block),
            norm_layer=norm,
        )
        return model

    return make


def efficientnet() -> nn.Module:
    """An EfficientNet of torchvision with two blocks."""
    imported_library("torchvision")
    library = imported_library("torchvision.models.efficientnet")
    blocks = [
        library.MBConvConfig(1, 3, 1, 8, 8, 1, 1.0, 1.0),
        library.MBConvConfig(6, 5, 2, 8, 16, 1, 1.0, 1.0),
    ]
    model = library.EfficientNet(
        blocks, dropout=0.0, stochastic_depth_prob=0.0, num_classes=CLASSES, last_channel=32
    )
    return without_batch_norm(model)


def mobilenet() -> nn.Module:
    """A MobileNetV2 of torchvision with three blocks."""
    imported_library("torchvision")
    library = imported_library("torchvision.models.mobilenetv2")
    blocks = [[1, 8, 1, 1], [6, 8, 1, 2], [6, 16, 1, 2]]
    return without_batch_norm(
        library.MobileNetV2(
            inverted_residual_setting=blocks, width_mult=0.25, num_classes=CLASSES, dropout=0.0
        )
    )


def poolformer() -> nn.Module:
    """A PoolFormer of timm with one block per stage."""
    library = imported_library("timm.models.metaformer")
    model: nn.Module = library.MetaFormer(
        depths=(1, 1), dims=(8, 16), token_mixers=library.Pooling, num_classes=CLASSES
    )
    return model


def convmixer() -> nn.Module:
    """The ConvMixer of timm."""
    library = imported_library("timm.models.convmixer")
    return without_batch_norm(library.ConvMixer(WIDTH, 2, kernel_size=3, patch_size=8, num_classes=CLASSES))


def tiny_vit(name: str, **settings: Any) -> Callable[[], nn.Module]:
    """A vision transformer of timm with few narrow blocks."""
    return timm(name, img_size=32, patch_size=8, embed_dim=WIDTH, depth=2, **settings)


def torchvision(name: str, **settings: Any) -> Callable[[], nn.Module]:
    """A torchvision model."""

    def make() -> nn.Module:
        imported_library("torchvision")
        models = imported_library("torchvision.models")
        return without_batch_norm(getattr(models, name)(num_classes=CLASSES, **settings))

    return make


def small_resnet(block: str, blocks: list[int], **settings: Any) -> Callable[[], nn.Module]:
    """A ResNet of torchvision with the given numbers of blocks."""

    def make() -> nn.Module:
        imported_library("torchvision")
        resnet = imported_library("torchvision.models.resnet")
        return without_batch_norm(
            resnet.ResNet(getattr(resnet, block), blocks, num_classes=CLASSES, norm_layer=groups, **settings)
        )

    return make


def groups(channels: int) -> nn.Module:
    """A group normalisation."""
    return nn.GroupNorm(math.gcd(channels, 2), channels)


def without_batch_norm(module: nn.Module) -> nn.Module:
    """The module with group normalisation in place of batch normalisation."""
    for name, child in module.named_children():
        if isinstance(child, nn.modules.batchnorm._BatchNorm):
            norm = groups(child.num_features)
            # timm's BatchNorm has both
            rest = [getattr(child, part) for part in ("drop", "act") if hasattr(child, part)]
            setattr(module, name, nn.Sequential(norm, *rest) if rest else norm)
        else:
            without_batch_norm(child)
    return module


def adapted(make: Callable[[], nn.Module], targets: list[str]) -> Callable[[], nn.Module]:
    """A model of which only PEFT's low-rank adapters and the head are trained."""

    def wrapped() -> nn.Module:
        peft, model = imported_library("peft"), make()
        config = peft.LoraConfig(r=2, target_modules=targets, lora_dropout=0.0, init_lora_weights=False)
        model.model = peft.get_peft_model(model.model, config)
        return model

    return wrapped


class Wired(nn.Module):
    """A module whose forward pass is a given function of its parts and the inputs."""

    def __init__(self, wiring: Callable[[Any, Tensor], Tensor], **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.wiring = wiring
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, inputs: Tensor) -> Tensor:
        """The function's outputs."""
        return self.wiring(self, inputs)


def encoder() -> nn.Module:
    """PyTorch's own transformer encoder on texts, with position embeddings and a padding mask."""

    def wiring(self: Any, words: Tensor) -> Tensor:
        hidden = self.table(words) + self.positions
        hidden = self.encoder(hidden, src_key_padding_mask=words == PADDING)
        outputs: Tensor = self.last(hidden[:, 0])
        return outputs

    layer = nn.TransformerEncoderLayer(WIDTH, 2, 24, dropout=0.0, batch_first=True)
    return Wired(
        wiring,
        table=nn.Embedding(WORDS, WIDTH),
        positions=nn.Parameter(torch.randn(1, LENGTH, WIDTH)),
        encoder=nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
        last=nn.Linear(WIDTH, CLASSES),
    )


def tagger(kind: type[nn.Module]) -> Callable[[], nn.Module]:
    """A recurrent network on texts; the sum over the words that are not padding."""

    def wiring(self: Any, words: Tensor) -> Tensor:
        there = (words != PADDING)[:, :, None]
        outputs: Tensor = (self.last(self.layers(self.table(words))[0]) * there).sum(dim=1)
        return outputs

    return lambda: Wired(
        wiring,
        table=nn.Embedding(WORDS, WIDTH, padding_idx=PADDING),
        layers=kind(WIDTH, 8, num_layers=2, bidirectional=True, batch_first=True),
        last=nn.Linear(16, CLASSES),
    )


def feature_tokenizer() -> nn.Module:
    """FT-Transformer (Gorishniy et al. 2021): each number in a row is a token."""

    def wiring(self: Any, rows: Tensor) -> Tensor:
        tokens = rows[:, :, None] * self.weight + self.bias
        tokens = torch.cat([self.token.expand(len(rows), 1, -1), tokens], dim=1)
        outputs: Tensor = self.last(self.encoder(tokens)[:, 0])
        return outputs

    layer = nn.TransformerEncoderLayer(WIDTH, 2, 24, dropout=0.0, batch_first=True, norm_first=True)
    return Wired(
        wiring,
        weight=nn.Parameter(torch.randn(9, WIDTH)),
        bias=nn.Parameter(torch.randn(9, WIDTH)),
        token=nn.Parameter(torch.randn(1, 1, WIDTH)),
        encoder=nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
        last=nn.Linear(WIDTH, CLASSES),
    )


def bag(mode: str) -> Callable[[], nn.Module]:
    """fastText: the mean or the sum of a text's word embeddings."""
    return lambda: nn.Sequential(nn.EmbeddingBag(WORDS, WIDTH, mode=mode), nn.Linear(WIDTH, CLASSES))


def series() -> nn.Module:
    """A 1-D CNN for time series."""
    return nn.Sequential(
        *(nn.Conv1d(4, 8, 5, padding=2), nn.GroupNorm(2, 8), nn.GELU(), nn.MaxPool1d(2)),
        *(weight_norm(nn.Conv1d(8, 8, 3, padding=2, dilation=2)), nn.ReLU(), nn.AdaptiveAvgPool1d(1)),
        *(nn.Flatten(), nn.Linear(8, CLASSES)),
    )


class UNet(nn.Module):
    """A U-Net with a transposed convolution and a skip connection; class maps are averaged over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.deep = self._block(3, 6), self._block(6, 8)
        self.up, self.flat = nn.ConvTranspose2d(8, 6, 2, stride=2), self._block(12, 6)
        self.last = nn.Conv2d(6, CLASSES, 1)

    @staticmethod
    def _block(channels: int, outputs: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(channels, outputs, 3, padding=1), nn.GroupNorm(2, outputs), nn.ReLU(inplace=True)
        )

    def forward(self, images: Tensor) -> Tensor:
        """Logits [batch, classes]."""
        down = self.down(images)
        up = self.up(self.deep(functional.max_pool2d(down, 2)))
        outputs: Tensor = self.last(self.flat(torch.cat([down, up], dim=1))).mean(dim=(2, 3))
        return outputs


class VolumeNet(nn.Module):
    """A U-Net for volumes, such as scans; here an image's colours are the slices."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.deep = self._block(1, 4), self._block(4, 8)
        self.up, self.last = nn.ConvTranspose3d(8, 4, (1, 2, 2), stride=(1, 2, 2)), nn.Conv3d(8, CLASSES, 1)

    @staticmethod
    def _block(channels: int, outputs: int) -> nn.Module:
        layers = (
            nn.Conv3d(channels, outputs, 3, padding=1),
            nn.InstanceNorm3d(outputs, affine=True),
            nn.PReLU(),
        )
        return nn.Sequential(*layers)

    def forward(self, images: Tensor) -> Tensor:
        """Logits [batch, classes]."""
        down = self.down(functional.avg_pool2d(images, 2)[:, None])
        up = self.up(self.deep(functional.max_pool3d(down, (1, 2, 2))))
        outputs: Tensor = self.last(torch.cat([down, up], dim=1)).mean(dim=(2, 3, 4))
        return outputs


def frames() -> nn.Module:
    """A network for single images, applied to a record's three; its outputs are averaged."""

    def wiring(self: Any, images: Tensor) -> Tensor:
        outputs: Tensor = (
            self.network(images.flatten(0, 1)[:, None]).unflatten(0, (len(images), -1)).mean(dim=1)
        )
        return outputs

    first = nn.Conv2d(1, 8, 3, 2, 1), nn.GroupNorm(2, 8), nn.ReLU()
    return Wired(
        wiring,
        network=nn.Sequential(
            *first,
            *(nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
            nn.Linear(16, CLASSES),
        ),
    )


def packed_tagger() -> nn.Module:
    """A recurrent network on packed texts; the last states of both directions."""

    def wiring(self: Any, words: Tensor) -> Tensor:
        lengths = (words != PADDING).sum(dim=1).clamp(min=1).cpu()
        packed = pack_padded_sequence(self.table(words), lengths, batch_first=True, enforce_sorted=False)
        ends = self.layers(packed)[1][0]
        outputs: Tensor = self.last(torch.cat([ends[-2], ends[-1]], dim=1))
        return outputs

    return Wired(
        wiring,
        table=nn.Embedding(WORDS, WIDTH, padding_idx=PADDING),
        layers=nn.LSTM(WIDTH, 8, bidirectional=True, batch_first=True),
        last=nn.Linear(16, CLASSES),
    )


def by_cell() -> nn.Module:
    """A recurrent network that loops over an LSTM cell itself."""

    def wiring(self: Any, words: Tensor) -> Tensor:
        state = (torch.zeros(len(words), WIDTH),) * 2
        for step in self.table(words).unbind(1):
            state = self.cell(step, state)
        outputs: Tensor = self.last(state[0])
        return outputs

    return Wired(
        wiring,
        table=nn.Embedding(WORDS, WIDTH, padding_idx=PADDING),
        cell=nn.LSTMCell(WIDTH, WIDTH),
        last=nn.Linear(WIDTH, CLASSES),
    )


def mlp_mixer_by_hand() -> nn.Module:
    """Matrix products with parameters on the left, as in token mixing."""

    def wiring(self: Any, series: Tensor) -> Tensor:
        hidden = torch.tanh(self.mix @ self.first(series))
        outputs: Tensor = self.last(torch.einsum("bcw,wv->bcv", hidden, self.out).mean(dim=1))
        return outputs

    return Wired(
        wiring,
        first=nn.Linear(24, WIDTH),
        mix=nn.Parameter(torch.randn(5, 4)),
        out=nn.Parameter(torch.randn(WIDTH, WIDTH)),
        last=nn.Linear(WIDTH, CLASSES),
    )


class Scan(nn.Module):
    """A selective state-space model (Gu and Dao 2023), computed step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = nn.Parameter(torch.log(torch.arange(1, 5).float()).repeat(8, 1))
        self.inside, self.around = nn.Linear(4, 8), nn.Linear(8, 4 + 4 + 8)
        self.short = nn.Conv1d(8, 8, 3, padding=2, groups=8)
        self.skip, self.last = nn.Parameter(torch.ones(8)), nn.Linear(8, CLASSES)

    def forward(self, series: Tensor) -> Tensor:
        """Logits [batch, classes]."""
        hidden = self.inside(series.transpose(1, 2))
        hidden = functional.silu(self.short(hidden.transpose(1, 2))[..., : hidden.shape[1]]).transpose(1, 2)
        keys, reads, steps = self.around(hidden).split([4, 4, 8], dim=-1)
        steps = functional.softplus(steps)
        decay = torch.exp(steps[..., None] * -torch.exp(self.rates))
        state, outputs = hidden.new_zeros(len(hidden), 8, 4), []
        for time in range(hidden.shape[1]):
            added = (steps[:, time] * hidden[:, time])[..., None] * keys[:, time, None]
            state = decay[:, time] * state + added
            outputs.append((state * reads[:, time, None]).sum(dim=-1) + self.skip * hidden[:, time])
        logits: Tensor = self.last(torch.stack(outputs, dim=1).mean(dim=1))
        return logits


class Perceiver(nn.Module):
    """A Perceiver: trained latents that attend to a record (Jaegle et al. 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(5, WIDTH))
        self.first = nn.Linear(4, WIDTH)
        self.cross = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.norm, self.last = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, series: Tensor) -> Tensor:
        """Logits [batch, classes]."""
        seen = self.first(series.transpose(1, 2))
        latents = self.latents.unsqueeze(0).repeat(len(series), 1, 1)
        outputs: Tensor = self.last(
            self.norm(self.cross(latents, seen, seen, need_weights=False)[0]).mean(dim=1)
        )
        return outputs


class Graph(nn.Module):
    """A graph isomorphism network (Xu et al. 2019) on padded graphs, with edges between nodes of close features."""

    def __init__(self) -> None:
        super().__init__()
        self.eps = nn.Parameter(torch.zeros(2))
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(size, WIDTH), nn.LayerNorm(WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
            for size in (4, WIDTH)
        )
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, series: Tensor) -> Tensor:
        """Logits [batch, classes]."""
        nodes = series.transpose(1, 2)
        edges = (torch.cdist(nodes, nodes) < 2.0).to(nodes)
        for eps, layer in zip(self.eps, self.layers, strict=True):
            nodes = layer((1.0 + eps) * nodes + edges @ nodes)
        outputs: Tensor = self.last(nodes.sum(dim=1))
        return outputs


def packed() -> nn.Module:
    """Hand-written attention with rotary embeddings, query and key norms, and one packed weight for all three."""

    def wiring(self: Any, words: Tensor) -> Tensor:
        hidden = self.table(words)
        query, key, value = (self.norm(hidden) @ self.weight).chunk(3, dim=-1)
        query, key = (
            functional.rms_norm(query, (WIDTH,), self.scale),
            functional.rms_norm(key, (WIDTH,), self.scale),
        )
        angles = torch.arange(LENGTH)[:, None] / 10.0 ** torch.linspace(0, 1, WIDTH // 2)
        query, key = (self.turned(part, angles) for part in (query, key))
        mask = (words != PADDING)[:, None, :].expand(-1, LENGTH, -1)
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        outputs: Tensor = functional.linear(mixed.mean(dim=1), self.out) + self.bias
        return outputs

    module = Wired(
        wiring,
        table=nn.Embedding(WORDS, WIDTH),
        norm=nn.RMSNorm(WIDTH),
        weight=nn.Parameter(torch.randn(WIDTH, 3 * WIDTH)),
        scale=nn.Parameter(torch.ones(WIDTH)),
        out=nn.Parameter(torch.randn(CLASSES, WIDTH)),
        bias=nn.Parameter(torch.zeros(CLASSES)),
    )
    module.__dict__["turned"] = lambda part, angles: torch.cat(
        [
            part[..., 0::2] * angles.cos().to(part) - part[..., 1::2] * angles.sin().to(part),
            part[..., 0::2] * angles.sin().to(part) + part[..., 1::2] * angles.cos().to(part),
        ],
        dim=-1,
    )
    return module


class KolmogorovArnold(nn.Module):
    """A layer with its own curve on every edge, a sum of bumps (Liu et al. 2024)."""

    middles: Tensor

    def __init__(self, inputs: int, outputs: int, bumps: int = 5) -> None:
        super().__init__()
        self.curves = nn.Parameter(0.3 * torch.randn(outputs, inputs, bumps))
        self.straight = nn.Linear(inputs, outputs)
        self.register_buffer("middles", torch.linspace(-2.0, 2.0, bumps))

    def forward(self, rows: Tensor) -> Tensor:
        """[batch, inputs] -> [batch, outputs]."""
        heights = torch.exp(-((rows[..., None] - self.middles) ** 2))
        outputs: Tensor = torch.einsum("big,oig->bo", heights, self.curves) + self.straight(
            functional.silu(rows)
        )
        return outputs


def bilinear() -> nn.Module:
    """A bilinear layer on two linear views of a row."""
    return Wired(
        lambda self, rows: self.last(torch.tanh(self.both(self.one(rows), self.other(rows)))),
        one=nn.Linear(9, 8),
        other=nn.Linear(9, 8),
        both=nn.Bilinear(8, 8, WIDTH),
        last=nn.Linear(WIDTH, CLASSES),
    )


def soft_experts() -> nn.Module:
    """Experts that all process a row and are mixed by the softmax of a gating layer."""

    def wiring(self: Any, rows: Tensor) -> Tensor:
        shares = self.shares(rows).softmax(dim=-1)
        mixed = torch.einsum(
            "be,beo->bo", shares, torch.einsum("bi,eio->beo", rows, self.experts) + self.bias
        )
        outputs: Tensor = self.last(torch.tanh(mixed))
        return outputs

    return Wired(
        wiring,
        shares=nn.Linear(9, 4),
        experts=nn.Parameter(0.3 * torch.randn(4, 9, WIDTH)),
        bias=nn.Parameter(torch.zeros(4, WIDTH)),
        last=nn.Linear(WIDTH, CLASSES),
    )


class Spoken(nn.Module):
    """A speech model of `transformers`, or its encoder, whose first output is averaged over time."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.last = model, nn.Linear(WIDTH, CLASSES)

    def forward(self, sounds: Tensor) -> Tensor:
        """Logits [batch, classes]."""
        outputs: Tensor = self.last(self.model(sounds).last_hidden_state.mean(dim=1))
        return outputs


_STILL_SPEECH = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0, "layerdrop": 0.0}
_WAV2VEC2 = {
    **_STILL_SPEECH,
    **{"hidden_dropout": 0.0, "feat_proj_dropout": 0.0, "mask_time_prob": 0.0, "num_feat_extract_layers": 2},
    **{"conv_dim": (8, 8), "conv_stride": (4, 4), "conv_kernel": (8, 4)},
    **{"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4},
}
_WHISPER = {
    **{"d_model": WIDTH, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 24},
    **{"num_mel_bins": 4, "max_source_positions": 12, "decoder_layers": 1, "decoder_attention_heads": 2},
    **{"decoder_start_token_id": 1, "suppress_tokens": None, "begin_suppress_tokens": None, **_STILL_SPEECH},
}


def whisper() -> nn.Module:
    """The encoder of Whisper."""
    make = hugging("Whisper", lambda model: Spoken(model.get_submodule("encoder")), "Model", **_WHISPER)
    return make()


def checkpointed(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """A model of `transformers` with gradient checkpointing."""

    def wrapped() -> nn.Module:
        model: Any = make()
        model.model.gradient_checkpointing_enable({"use_reentrant": False})
        trained: nn.Module = model.train()
        return trained

    return wrapped


_BERT = classifier("Bert", **_STILL)
_GPT2 = classifier("GPT2", **_GPT, **_NO_DROP)

ZOO: Mapping[str, Architecture] = {
    "ResNet-18 (torchvision)": Architecture(
        small_resnet("BasicBlock", [1, 1, 1, 1], width_per_group=64), IMAGE
    ),
    "ResNet-50 (torchvision)": Architecture(
        small_resnet("Bottleneck", [1, 1, 1, 1], width_per_group=16), IMAGE
    ),
    "ResNet-26 (timm)": Architecture(
        timm("resnet26", channels=(8, 8, 16, 16), stem_width=8, layers=(1, 1, 1, 1)), IMAGE
    ),
    "Wide ResNet (timm)": Architecture(
        timm("wide_resnet50_2", channels=(4, 8, 8, 8), stem_width=8, layers=(1, 1, 1, 1)), IMAGE
    ),
    "ResNetV2, weights standardised (timm)": Architecture(
        timm("resnetv2_50", layers=(1, 1, 1, 1), channels=(16, 32, 32, 64), stem_chs=32), IMAGE
    ),
    "NF-ResNet, weights standardised (timm)": Architecture(timm("nf_resnet26", width_factor=0.125), IMAGE),
    "ConvNeXt (timm)": Architecture(timm("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 8, 16, 16)), IMAGE),
    "EfficientNet (torchvision)": Architecture(efficientnet, IMAGE),
    "MobileNetV2 (torchvision)": Architecture(mobilenet, IMAGE),
    "MobileNetV3 (timm)": Architecture(timm("mobilenetv3_small_050"), IMAGE),
    "ViT (timm)": Architecture(tiny_vit("vit_tiny_patch16_224", num_heads=2), IMAGE),
    "DeiT, distilled (timm)": Architecture(tiny_vit("deit_tiny_distilled_patch16_224", num_heads=2), IMAGE),
    "Swin (timm)": Architecture(
        timm(
            "swin_tiny_patch4_window7_224",
            img_size=32,
            window_size=4,
            embed_dim=8,
            depths=(2, 2),
            num_heads=(2, 2),
            drop_path_rate=0.0,
        ),
        IMAGE,
    ),
    "MLP-Mixer (timm)": Architecture(mixer("MixerBlock", nn.LayerNorm), IMAGE),
    "ConvMixer (timm)": Architecture(convmixer, IMAGE),
    "BERT": Architecture(_BERT, TOKENS),
    "DistilBERT": Architecture(
        classifier(
            "DistilBert",
            dim=WIDTH,
            n_layers=2,
            n_heads=2,
            hidden_dim=24,
            dropout=0.0,
            attention_dropout=0.0,
            seq_classif_dropout=0.0,
        ),
        TOKENS,
    ),
    "RoBERTa": Architecture(classifier("Roberta", **_STILL), TOKENS),
    "ELECTRA": Architecture(classifier("Electra", embedding_size=8, **_STILL), TOKENS),
    "ModernBERT": Architecture(classifier("ModernBert", cls_token_id=1, sep_token_id=2), TOKENS),
    "GPT-2": Architecture(_GPT2, TOKENS),
    "GPT-2, language model": Architecture(
        hugging("GPT2", LanguageModel, "LMHeadModel", **_GPT, **_NO_DROP), TOKENS
    ),
    "OPT": Architecture(classifier("OPT", ffn_dim=24, word_embed_proj_dim=WIDTH, dropout=0.0), TOKENS),
    "Llama": Architecture(classifier("Llama", num_key_value_heads=1), TOKENS),
    "Qwen2": Architecture(classifier("Qwen2", num_key_value_heads=1), TOKENS),
    "T5 encoder": Architecture(
        hugging(
            "T5",
            Pooled,
            "EncoderModel",
            d_model=WIDTH,
            d_kv=8,
            d_ff=24,
            num_layers=2,
            num_heads=2,
            dropout_rate=0.0,
        ),
        TOKENS,
    ),
    "ViT (transformers)": Architecture(vision("ViT", **_STILL), IMAGE),
    "CLIP, text side": Architecture(hugging("CLIPText", Pooled, "Model"), TOKENS),
    "LoRA on BERT": Architecture(adapted(_BERT, ["query", "value"]), TOKENS),
    "LoRA on GPT-2": Architecture(adapted(_GPT2, ["c_attn"]), TOKENS),
    "nn.TransformerEncoder": Architecture(encoder, TOKENS),
    "LSTM tagger": Architecture(tagger(nn.LSTM), TOKENS),
    "GRU tagger": Architecture(tagger(nn.GRU), TOKENS),
    "FT-Transformer": Architecture(feature_tokenizer, ROW),
    "embedding bag, mean": Architecture(bag("mean"), TOKENS),
    "embedding bag, sum": Architecture(bag("sum"), TOKENS),
    "1-D CNN, weight norm": Architecture(series, SERIES),
    "U-Net": Architecture(UNet, IMAGE),
    "BERT, gradient checkpointing": Architecture(checkpointed(_BERT), TOKENS),
    "GPT-2, gradient checkpointing": Architecture(checkpointed(_GPT2), TOKENS),
    "DeBERTa-v2": Architecture(
        classifier(
            "DebertaV2",
            relative_attention=True,
            pos_att_type=["p2c", "c2p"],
            pooler_dropout=0.0,
            position_biased_input=False,
            **_STILL,
        ),
        TOKENS,
        False,
    ),
    "ALBERT, shared layers": Architecture(
        classifier("Albert", embedding_size=8, num_hidden_groups=1, classifier_dropout_prob=0.0, **_STILL),
        TOKENS,
        False,
    ),
    "BART": Architecture(
        hugging(
            "Bart",
            Pooled,
            "Model",
            d_model=WIDTH,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=24,
            decoder_ffn_dim=24,
            dropout=0.0,
            decoder_start_token_id=2,
        ),
        TOKENS,
        False,
    ),
    "Mistral": Architecture(classifier("Mistral", num_key_value_heads=1, sliding_window=4), TOKENS, False),
    "Gemma": Architecture(classifier("Gemma", num_key_value_heads=1, head_dim=8), TOKENS, False),
    "GPT-NeoX": Architecture(classifier("GPTNeoX"), TOKENS, False),
    "BLOOM": Architecture(classifier("Bloom", n_layer=2, n_head=2), TOKENS, False),
    "FNet": Architecture(
        hugging("FNet", Pooled, "Model", use_tpu_fourier_optimizations=False, **_STILL), TOKENS, False
    ),
    "MPNet": Architecture(classifier("MPNet", **_STILL), TOKENS, False),
    "Mamba": Architecture(hugging("Mamba", Pooled, "Model", state_size=4), TOKENS, False),
    "BEiT (transformers)": Architecture(
        vision(
            "Beit",
            use_relative_position_bias=True,
            use_absolute_position_embeddings=True,
            drop_path_rate=0.0,
            **_STILL,
        ),
        IMAGE,
        False,
    ),
    "DINOv2": Architecture(vision("Dinov2", **_STILL), IMAGE, False),
    "MobileViT (timm)": Architecture(timm("mobilevit_xxs"), IMAGE, False),
    "ResNeXt (torchvision)": Architecture(
        small_resnet("Bottleneck", [1, 1, 1, 1], groups=4, width_per_group=4), IMAGE, False
    ),
    "RegNet (timm)": Architecture(timm("regnety_002"), IMAGE, False),
    "DenseNet (torchvision)": Architecture(
        torchvision("DenseNet", growth_rate=4, block_config=(2, 2, 2), num_init_features=8), IMAGE, False
    ),
    "CaiT (timm)": Architecture(tiny_vit("cait_xxs24_224", num_heads=2), IMAGE, False),
    "PVT v2 (timm)": Architecture(
        timm("pvt_v2_b0", embed_dims=(8, 8, 16, 16), depths=(1, 1, 1, 1), num_heads=(1, 2, 2, 4)),
        IMAGE,
        False,
    ),
    "PoolFormer (timm)": Architecture(poolformer, IMAGE, False),
    "mixer by hand": Architecture(mlp_mixer_by_hand, SERIES, False),
    "selective state space": Architecture(Scan, SERIES, False),
    "Perceiver": Architecture(Perceiver, SERIES, False),
    "graph network, padded": Architecture(Graph, SERIES, False),
    "attention by hand": Architecture(packed, TOKENS, False),
    "ConvNeXtV2 (timm)": Architecture(
        timm("convnextv2_atto", depths=(1, 1, 1, 1), dims=(8, 8, 16, 16)), IMAGE, False
    ),
    "XCiT (timm)": Architecture(
        timm("xcit_nano_12_p8_224", img_size=32, embed_dim=WIDTH, depth=2, num_heads=2), IMAGE, False
    ),
    "SegFormer": Architecture(
        hugging(
            "Segformer",
            Logits,
            "ForImageClassification",
            hidden_sizes=[8, 8, 16, 16],
            depths=[1, 1, 1, 1],
            num_attention_heads=[1, 1, 2, 2],
            hidden_act="gelu",
            drop_path_rate=0.0,
            classifier_dropout_prob=0.0,
            **_STILL,
        ),
        IMAGE,
        False,
    ),
    "wav2vec 2.0": Architecture(hugging("Wav2Vec2", Spoken, "Model", **_WAV2VEC2), (400,), False),
    "Whisper encoder": Architecture(whisper, SERIES, False),
    "Kolmogorov-Arnold": Architecture(
        lambda: nn.Sequential(KolmogorovArnold(9, WIDTH), KolmogorovArnold(WIDTH, CLASSES)), ROW, False
    ),
    "bilinear": Architecture(bilinear, ROW, False),
    "soft mixture of experts": Architecture(soft_experts, ROW, False),
    "U-Net of volumes": Architecture(VolumeNet, IMAGE, False),
    "frames of a film": Architecture(frames, IMAGE, False),
    "RNN tagger": Architecture(tagger(nn.RNN), TOKENS, False),
    "LSTM, by its cell": Architecture(by_cell, TOKENS, False),
    "LSTM, packed": Architecture(packed_tagger, TOKENS, False),
}

LARGE = (
    "ResNet-18 (torchvision)",
    "ResNet-50 (torchvision)",
    "MobileNetV3 (timm)",
    "MobileViT (timm)",
    "ResNeXt (torchvision)",
    "RegNet (timm)",
    "NF-ResNet, weights standardised (timm)",
)
"""The architectures that cannot be made tiny."""

"""Workloads of networks that people fine-tune, from public libraries, with random weights; and small versions."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from algorithms.models.libraries import imported_library

_LENGTH = 128


class Logits(nn.Module):
    """A classifier of transformers, tokens [batch, length] -> logits [batch, classes]."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits of sequences without padding."""
        outputs: Tensor = self.model(input_ids=tokens).logits
        return outputs


def resnet18(*, small: bool) -> nn.Module:
    """ResNet-18 with GroupNorm in place of BatchNorm, for 1000 classes; small: for 10.

    It adds in place, which Opacus's hooks do not support.
    """
    resnet = imported_library("torchvision.models.resnet")
    network: nn.Module = resnet.ResNet(
        resnet.BasicBlock,
        [1, 1, 1, 1] if small else [2, 2, 2, 2],
        num_classes=10 if small else 1000,
        norm_layer=partial(nn.GroupNorm, 32),
    )
    return network


def vit_small(*, small: bool) -> nn.Module:
    """ViT-Small with patches of 16 pixels; small: two blocks of width 64."""
    form = (
        {"embed_dim": 64, "depth": 2, "num_heads": 2}
        if small
        else {"embed_dim": 384, "depth": 12, "num_heads": 6}
    )
    size, classes = (32, 10) if small else (224, 1000)
    network: nn.Module = imported_library("timm").models.VisionTransformer(
        img_size=size, patch_size=16, num_classes=classes, **form
    )
    return network


def bert(*, small: bool) -> nn.Module:
    """BERT-base for two classes, without dropout; small: two layers of width 64."""
    library = imported_library("transformers")
    form = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    config = library.BertConfig(
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        vocab_size=VOCABULARY,
        **(form if small else {}),
    )
    return Logits(library.BertForSequenceClassification(config))


def gpt2(*, small: bool) -> nn.Module:
    """GPT-2 of 124 million parameters for two classes, without dropout; small: two layers of width 64."""
    library = imported_library("transformers")
    form = {"n_embd": 64, "n_layer": 2, "n_head": 2} if small else {}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), VOCABULARY)  # not in any record
    config = library.GPT2Config(vocab_size=VOCABULARY + 1, **ends, **dropout, **form)
    return Logits(library.GPT2ForSequenceClassification(config))


def adapted(make: Callable[..., nn.Module], *names: str) -> Callable[..., nn.Module]:
    """A network of which only the head and rank-8 adapters on the named layers are trained."""

    def make_adapted(*, small: bool) -> nn.Module:
        library: Any = imported_library("peft")
        module = make(small=small)
        config = library.LoraConfig(
            r=8,
            target_modules=list(names),
            modules_to_save=["classifier", "score"],
            fan_in_fan_out="c_attn" in names,
        )
        wrapped: nn.Module = library.get_peft_model(module, config)
        return wrapped

    return make_adapted


VOCABULARY = 1000
"""Vocabulary size; an embedding has gradients only for the tokens looked up, whatever this size."""

TABLE: dict[str, tuple[str, Callable[..., nn.Module], tuple[int, ...], int]] = {
    "resnet18": ("ResNet-18 with GroupNorm", resnet18, (3, 224, 224), 256),
    "vit": ("ViT-Small/16", vit_small, (3, 224, 224), 256),
    "bert": ("BERT-base, in full", bert, (_LENGTH,), 128),
    "bert-lora": ("BERT-base with LoRA", adapted(bert, "query", "value"), (_LENGTH,), 128),
    "gpt2": ("GPT-2, in full", gpt2, (_LENGTH,), 128),
    "gpt2-lora": ("GPT-2 with LoRA", adapted(gpt2, "c_attn"), (_LENGTH,), 128),
}
"""By name: a description, the module, the shape of a record, and records in a step on a GPU."""

"""Architectures of timm and Hugging Face, with random or public weights, trained whole or through LoRA adapters.

Weights are read only from safetensors files, never from a pickle. They count as public, and the card states their
checksum. Nothing is downloaded here.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import torch
from pydantic import Field, JsonValue, field_validator, model_validator
from torch import Tensor, nn

from algorithms.models.batch_norm import batch_norm_layers, replace_batch_norm
from algorithms.models.libraries import digest, imported_library, public_folder, read_tensors
from algorithms.models.model import (
    Model,
    ModelRefusedError,
    ModelSettings,
    ModelSpec,
    batch_experts,
    model_build_error,
)
from algorithms.models.objectives import classifier
from algorithms.stated_names import without_folders

_NOT_OF_OPTIONS = ("checkpoint_path", "pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir")
"""Arguments of timm that would read other files, or download them."""
_NOT_OURS = ("id2label", "label2id", "dtype", "torch_dtype")
"""Entries of a configuration that this module sets itself."""


class Adapter(ModelSettings):
    """Low-rank adapters (Hu et al. 2022) by PEFT: everything except adapters and head is frozen.

    kind: low-rank adapters. rank: of each adapter. alpha: adapters are scaled by alpha / rank. targets: name suffixes
    of the layers that get an adapter; by default PEFT's choice for the architecture.
    """

    kind: Literal["lora"] = "lora"
    rank: int = Field(default=8, ge=1)
    alpha: float = Field(default=16.0, gt=0)
    targets: list[str] | None = Field(default=None, min_length=1)


class _Public(ModelSettings):
    """Settings of both libraries' models.

    checkpoint: a public model: its folder, "all-minilm-l6-v2", or a name in the hub's cache on this machine. Its head
    may be missing or have another number of classes. checkpoint_file: a safetensors file of weights alone.
    replace_batch_norm: true replaces by GroupNorm; "frozen" keeps the layers with the checkpoint's statistics.
    adapter: train low-rank adapters instead of the weights.
    """

    checkpoint: str | None = Field(default=None, min_length=1)
    checkpoint_file: str | None = Field(default=None, min_length=1)
    replace_batch_norm: bool | Literal["frozen"] = False
    adapter: Adapter | None = None

    def without_files(self) -> dict[str, JsonValue]:
        return self.model_dump(exclude={"checkpoint", "checkpoint_file", "config_file"}, exclude_none=True)

    @model_validator(mode="after")
    def _has_one_checkpoint(self) -> Self:
        if self.checkpoint is not None and self.checkpoint_file is not None:
            raise ValueError("checkpoint has its weights with it; leave out checkpoint_file")
        return self


class TimmSettings(_Public):
    """architecture: its name in timm. options: further arguments of `timm.create_model`, such as img_size."""

    architecture: str = Field(min_length=1, pattern=r"^[^:/\\]+$")
    options: dict[str, JsonValue] = Field(default_factory=dict)

    @field_validator("options")
    @classmethod
    def _name_no_files(cls, options: dict[str, JsonValue]) -> dict[str, JsonValue]:
        if others := [name for name in _NOT_OF_OPTIONS if name in options]:
            raise ValueError(
                f"{others[0]} is no option; weights come from checkpoint_file, a safetensors file"
            )
        return options


_CLASSES = {
    "sequence-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "image-classification": "AutoModelForImageClassification",
    "language-modelling": "AutoModelForCausalLM",
}


def task_of(predicts: str, *, is_text: bool) -> str:
    """The task for a target."""
    by_record = "sequence-classification" if is_text else "image-classification"
    return {"next token": "language-modelling", "tags": "token-classification"}.get(predicts, by_record)


class HuggingFaceSettings(_Public):
    """config: as in config.json, including model_type. config_file: instead, the path of such a file; neither with a
    checkpoint.
    """

    config: dict[str, JsonValue] | None = None
    config_file: str | None = Field(default=None, min_length=1)

    @model_validator(mode="after")
    def _has_one_config(self) -> Self:
        if sum(source is not None for source in (self.config, self.config_file, self.checkpoint)) != 1:
            raise ValueError("it needs checkpoint, config or config_file, one of them; give one")
        return self

    def without_files(self) -> dict[str, JsonValue]:
        return super().without_files() | {"config": self.content()}

    def content(self) -> dict[str, Any]:
        """The configuration; raises ModelRefusedError for a file without one."""
        if self.checkpoint is not None:
            with public_folder(self.checkpoint) as folder:
                return HuggingFaceSettings(config_file=str(folder / "config.json")).content()
        if self.config_file is None:
            return dict(self.config or {})
        try:
            config = json.loads(Path(self.config_file).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            config = None
        if not isinstance(config, dict):
            raise ModelRefusedError(
                f"{self.config_file} is no JSON file with a configuration; get one with:"
                " hf download NAME config.json model.safetensors --local-dir FOLDER."
            )
        return config


class Logits(nn.Module):
    """A model of transformers from records to logits [batch, ..., classes].

    padding: of tokens [batch, length], which the attention mask excludes; None for images [batch, channels, height,
    width].
    """

    def __init__(self, model: nn.Module, padding: int | None) -> None:
        super().__init__()
        self.model, self.padding = model, padding

    def forward(self, records: Tensor) -> Tensor:
        if self.padding is None:
            of_images: Tensor = self.model(pixel_values=records).logits
            return of_images
        ids = records.long()
        logits: Tensor = self.model(input_ids=ids, attention_mask=(ids != self.padding).long()).logits
        return logits


@dataclass(frozen=True)
class _LibraryNetwork:
    """The network of a library.

    prefix: of the names in its body. heads: name prefixes of the head's parameters. has_own_head: whether the head is
    new for the data, not pretrained.
    """

    module: nn.Module
    prefix: str
    heads: tuple[str, ...]
    has_own_head: bool = True


def timm_model(spec: ModelSpec, settings: TimmSettings) -> Model:
    """A model of timm for images; raises ModelRefusedError for other records and if timm cannot build it."""
    if len(spec.input_shape) != 3:
        raise ModelRefusedError(
            f"the model 'timm' takes images [channels, height, width], not records of shape {spec.input_shape};"
            " use 'softmax' or 'mlp'."
        )
    timm = imported_library("timm")
    try:
        module = timm.create_model(
            settings.architecture,
            pretrained=False,
            num_classes=spec.classes,
            in_chans=spec.input_shape[0],
            **settings.options,
        )
    except Exception as error:
        raise model_build_error("timm", error) from None
    named = module.pretrained_cfg.get("classifier") or ()
    heads = (named,) if isinstance(named, str) else tuple(named)
    return _finish("timm", _LibraryNetwork(module, "", heads), module, settings)


def huggingface_model(spec: ModelSpec, settings: HuggingFaceSettings) -> Model:
    """A model of transformers from its configuration; raises ModelRefusedError if it does not fit the records."""
    task, content = task_of(spec.predicts, is_text=spec.tokens is not None), settings.content()
    is_text = task != "image-classification"
    if is_text and content.get("vocab_size", 0) < (spec.tokens or 0):
        raise ModelRefusedError(
            f"the configuration has vocab_size {content.get('vocab_size')}, and the data have {spec.tokens} tokens;"
            " set vocab_size to at least that."
        )
    if is_text and content.get("max_position_embeddings", math.inf) < spec.input_shape[0]:
        raise ModelRefusedError(
            f"the model has {content['max_position_embeddings']} positions, and the texts have"
            f" {spec.input_shape[0]} tokens; declare shorter texts."
        )
    if any(map(_is_of_timm, _parts(content))):
        raise ModelRefusedError(
            "the configuration is of a model that timm builds or that downloads weights; take the model 'timm', or a"
            " configuration whose weights are in its own file."
        )
    transformers = imported_library("transformers")
    configuration = content | {"pad_token_id": spec.padding}
    configuration |= {} if task == "language-modelling" else {"num_labels": spec.classes}
    # Named labels would override their number. Gradients have 32 bits, whatever type the weights are stored in.
    configuration = {key: value for key, value in configuration.items() if key not in _NOT_OURS}
    try:
        config = transformers.AutoConfig.for_model(configuration.pop("model_type"), **configuration)
        module = getattr(transformers, _CLASSES[task]).from_config(
            config, attn_implementation="eager", trust_remote_code=False
        )
    except Exception as error:
        raise model_build_error("huggingface", error) from None
    prefix = f"{module.base_model_prefix}."
    heads = tuple(name for name, _ in module.named_children() if f"{name}." != prefix)
    around = Logits(module, spec.padding if is_text else None)
    network = _LibraryNetwork(module, prefix, heads, task != "language-modelling")
    model = _finish("huggingface", network, around, settings)
    if task == "language-modelling":
        _check_causal(model, spec)
    return model


def _parts(content: Mapping[str, object]) -> Iterator[Mapping[str, object]]:
    """A configuration and the configurations in it, at any depth, such as those of towers and backbones."""
    rest: list[object] = [content]
    while rest:
        part = rest.pop()
        if isinstance(part, Mapping):
            yield part
            rest += part.values()
        elif isinstance(part, list):
            rest += part


def _is_of_timm(part: Mapping[str, object]) -> bool:
    """Whether timm builds a part of a configuration, by arguments or a name that may be of files or of a download."""
    names = (str(part.get(key, "")) for key in ("architecture", "backbone"))
    return (
        part.get("model_type") in ("timm_wrapper", "timm_backbone")
        or bool(part.get("use_pretrained_backbone") or part.get("model_args"))
        or any(set(":/\\") & set(name) for name in names)
    )


def _check_causal(model: Model, spec: ModelSpec) -> None:
    """Raises ModelRefusedError if a prediction depends on later tokens, as for a BERT.

    Checked by the gradient of the predictions before the last token by the last embedding, which needs no tolerance.
    """
    module: Any = library_model(model)
    length = min(8, spec.input_shape[0])
    if length < 2 or any(tensor.is_meta for tensor in module.parameters()):
        return
    seen: list[Tensor] = []

    def watch(_layer: nn.Module, _inputs: object, vectors: Tensor) -> Tensor:
        seen.append(vectors.detach().requires_grad_())
        return seen[-1]

    handle = module.get_input_embeddings().register_forward_hook(watch)
    try:
        entry = 0 if spec.padding != 0 else 1
        with torch.enable_grad():
            logits = model.module(torch.full((1, length), entry))[:, :-1]
            (slopes,) = torch.autograd.grad(logits.square().sum(), seen[0])
    finally:
        handle.remove()
    if slopes[0, -1].abs().max() > 1e-5 * slopes.abs().max():
        raise ModelRefusedError(
            "the model sees the tokens that it is to predict, since it does not go from left to right; take a causal"
            " one, such as GPT-2."
        )


def library_model(model: Model) -> nn.Module:
    """The library's own module within a model of this file."""
    return model.module.model if isinstance(model.module, Logits) else model.module


def _finish(name: str, network: _LibraryNetwork, around: nn.Module, settings: _Public) -> Model:
    """Replace normalisation, load the checkpoint and add adapters."""
    notes = []
    layers = batch_norm_layers(network.module)
    if layers and not settings.replace_batch_norm:
        raise ModelRefusedError(
            "the model {name!r} has the BatchNorm layer {layer}, which mixes the records of a batch; set"
            " {network.replace_batch_norm} to true, which makes it GroupNorm, or to frozen, which keeps the"
            " statistics of its public checkpoint.",
            code="batch_norm_of_model",
            name=name,
            layer=layers[0],
        )
    # Frozen BatchNorm layers use no statistics of records in evaluation mode, which is set below.
    if settings.replace_batch_norm is True:
        replace_batch_norm(network.module)
    if settings.checkpoint_file is not None:
        path = Path(settings.checkpoint_file)
        notes.append(_load_checkpoint(network, path, path.name))
    if settings.checkpoint is not None:
        with public_folder(settings.checkpoint) as folder:
            called = without_folders(settings.checkpoint)
            notes.append(_load_checkpoint(network, folder / "model.safetensors", called))
    if settings.adapter is not None:
        notes.append(_with_adapters(name, network, settings.adapter))
    batch_experts(network.module)
    around.eval()  # dropout is off: clipping and noise regularise already
    return classifier(name, around, notes=tuple(notes))


def _load_checkpoint(network: _LibraryNetwork, path: Path, called: str) -> str:
    """Load a checkpoint into the module; returns a note on it. A head that does not fit keeps its random start."""
    stored = read_tensors(
        path,
        "get one with: hf download NAME config.json model.safetensors --local-dir FOLDER",
        code="checkpoint_unreadable",
    )
    state = network.module.state_dict()
    tensors = {name if name in state else network.prefix + name: tensor for name, tensor in stored.items()}
    # A head that is tied to the embeddings is not stored twice.
    there = {state[name].data_ptr() for name in tensors if name in state}
    is_new = [
        name
        for name, value in state.items()
        if (value.data_ptr() not in there if name not in tensors else tensors[name].shape != value.shape)
    ]
    misfits = [name for name in is_new if not name.startswith(tuple(f"{head}." for head in network.heads))]
    if misfits:
        raise ModelRefusedError(
            f"{called} does not give {misfits[0]} in the form that the model has; give the file of the same"
            " architecture and configuration."
        )
    fitting = {name: tensor for name, tensor in tensors.items() if name in state and name not in is_new}
    if not all(bool(torch.isfinite(tensor).all()) for tensor in fitting.values()):
        raise ModelRefusedError(f"{called} is not finite everywhere; give the file of a sound model.")
    network.module.load_state_dict(fitting, strict=False)
    new = f", except for {', '.join(is_new)}, drawn from the model's seed." if is_new else "."
    return f"The start is the public file {called} (SHA-256 {digest(path)}){new}"


def _with_adapters(name: str, network: _LibraryNetwork, adapter: Adapter) -> str:
    """Add LoRA to the module and freeze everything except adapters and head; returns a note on it."""
    peft = imported_library("peft")
    config = peft.LoraConfig(
        r=adapter.rank, lora_alpha=adapter.alpha, target_modules=adapter.targets, lora_dropout=0.0
    )
    try:
        peft.inject_adapter_in_model(config, network.module)
    except ValueError as error:
        raise model_build_error(name, error) from None
    heads = tuple(f"{head}." for head in network.heads if network.has_own_head)
    for parameter, value in network.module.named_parameters():
        value.requires_grad_("lora_" in parameter or parameter.startswith(heads))
    on = "the layers that PEFT takes" if adapter.targets is None else ", ".join(adapter.targets)
    return (
        f"Trained are LoRA adapters of rank {adapter.rank} on {on}{', and the head' if heads else ''} alone."
    )

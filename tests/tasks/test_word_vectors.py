"""Word vectors from a file reach the tokens of their words: of the reader's list, whatever else the public list has."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from ruamel.yaml import YAML

from algorithms.models import ModelRefusedError
from data import dataset_info, prepared
from data.card import CARDS, DataCard, data_card
from data.files import FileSources, fetch
from data.readers import texts as of_texts
from data.reading import word_list
from tasks.config import params
from tasks.config.params import ModelParams
from tasks.model_building import model_of
from tasks.prepare import prepare
from tests.data.conftest import tar
from tests.support.mirror import MIRROR, needs_mirror

LISTED = ("the", "!", "film", "sci-fi", "good", "bad")
TOKENS = {"the": 2, "film": 3, "good": 4, "bad": 5}
LIST = "".join(f"{word}\n" for word in TOKENS)
TEXT = b"The good sci-fi film!"


def archive(path: Path) -> Path:
    texts = {f"{part}/{label}/0_1.txt": TEXT for part in ("train", "test") for label in ("neg", "pos")}
    members = {
        "reviews/words.txt": "\n".join(LISTED).encode(),
        **{f"reviews/{k}": v for k, v in texts.items()},
    }
    return tar(path, members)


def card_file(folder: Path) -> Path:
    """A card of such an archive in the folder."""
    document = YAML(typ="safe", pure=True).load(CARDS / "imdb.yaml")
    checksum = hashlib.sha256(archive(folder / "a.tar.gz").read_bytes()).hexdigest()
    reader = {"kind": "reviews", "words": "reviews/words.txt", "vocabulary": 6, "length": 5}
    document |= {"name": "small", "records": {"train": 2, "test": 2}}
    document["reader"] = reader | {"words_sha256": hashlib.sha256(LIST.encode()).hexdigest()}
    document["files"] = {"archive": {"path": "a.tar.gz", "sha256": checksum}}
    del document["alternatives"]
    path = folder / "small.yaml"
    YAML().dump(document, path)
    return path


def table(card: DataCard, words_file: Path, vectors: Mapping[str, float], folder: Path) -> torch.Tensor:
    """The embedding of a model with word vectors of one number."""
    (folder / "vectors.txt").write_text("".join(f"{word} {number}\n" for word, number in vectors.items()))
    paths = {"embedding_file": str(folder / "vectors.txt"), "words_file": str(words_file)}
    model = ModelParams(name="bilstm", settings={"embedding": "glove", "width": 1} | paths)
    return model_of(model, dataset_info(card)).module.get_parameter("embedding.weight").detach()


def test_every_word_of_a_list_with_words_that_no_text_has_gets_its_own_vector(tmp_path: Path) -> None:
    card_file(tmp_path)
    settings = params.parse({"data": {"dataset": "small"}}, reads=("data",))
    made = tmp_path / "prepared"
    prepare(settings, mirror=None, home=tmp_path, destination=made, root=tmp_path, cards=tmp_path)
    assert (made / "words.txt").read_text() == LIST
    card = data_card("small", tmp_path)
    rows = table(card, made / "words.txt", {word: 10.0 * i for word, i in TOKENS.items()}, tmp_path)
    tokens = prepared.load(made).train_features[0].tolist()
    assert [rows[token].item() for token in tokens if token != of_texts.UNKNOWN_WORD] == [20.0, 40.0, 30.0]
    for token in TOKENS.values():
        assert rows[token].tolist() == [10.0 * token]
    (tmp_path / "listed.txt").write_text("\n".join(LISTED[:4]))
    with pytest.raises(ModelRefusedError, match=r"set words_file to the words\.txt"):
        table(card, tmp_path / "listed.txt", {"the": 1.0}, tmp_path)


@needs_mirror
def test_the_words_of_imdb_stand_at_their_tokens(tmp_path: Path) -> None:
    card = data_card("imdb")
    files = fetch(card, FileSources(root=tmp_path, mirror=Path(MIRROR or ""), cache=tmp_path), key=bytes(32))
    listed = word_list(card, files) or b""
    (tmp_path / "words.txt").write_bytes(listed)
    words = of_texts._vocabulary(of_texts._member(files["archive"], "aclImdb/imdb.vocab"), 20000, tmp_path)
    assert (words["good"], len(words), "!" in words) == (48, 19998, False)
    marks = {word: float(i) for i, word in enumerate(("the", "good", "awful", "don't", "terrible"), start=3)}
    rows = table(card, tmp_path / "words.txt", marks, tmp_path)
    for word, mark in marks.items():
        assert rows[int(of_texts.tokens(word, words, length=1)[0])].tolist() == [mark]
    published = of_texts._member(files["archive"], "aclImdb/imdb.vocab").decode().splitlines()
    (tmp_path / "imdb.vocab").write_text("\n".join(published[:19998]))
    with pytest.raises(ModelRefusedError, match="not the list of the words"):
        table(card, tmp_path / "imdb.vocab", marks, tmp_path)

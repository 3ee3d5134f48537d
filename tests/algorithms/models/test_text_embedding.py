"""The embedding of the texts' model: random, from a file, or learned."""

from pathlib import Path

import pytest
import torch

from algorithms.models import Model, ModelRefusedError, build, digest
from tests.support.refusals import refused_as

WORDS = ("the", "film", "was", "fine")
VECTORS = {"film": (1.0, 2.0, 3.0), "other": (9.0, 9.0, 9.0), "the": (4.0, 5.0, 6.0)}


def model_of(words_sha256: str | None = None, **settings: object) -> Model:
    own = {"width": 3} | settings
    return build(
        "bilstm",
        input_shape=(5,),
        classes=2,
        seed=0,
        tokens=2 + len(WORDS),
        words_sha256=words_sha256,
        settings=own,
    )


def model_of_files(settings: dict[str, object]) -> Model:
    """For data whose words are those of the list."""
    return model_of(digest(Path(str(settings["words_file"]))), **settings)


def files(folder: Path, text: str | None = None, words: str | None = None) -> dict[str, object]:
    lines = "".join(f"{word} {' '.join(map(str, numbers))}\n" for word, numbers in VECTORS.items())
    (folder / "vectors.txt").write_text(lines if text is None else text)
    (folder / "words.txt").write_text("\n".join(WORDS) if words is None else words)
    paths = {"embedding_file": str(folder / "vectors.txt"), "words_file": str(folder / "words.txt")}
    return {"embedding": "glove"} | paths


def table_of(model: Model) -> torch.Tensor:
    return model.module.get_parameter("embedding.weight").detach()


def test_a_random_embedding_is_frozen_and_its_vectors_have_length_about_one() -> None:
    model = build("bilstm", input_shape=(5,), classes=2, seed=0, tokens=400)
    assert "embedding.weight" not in model.shapes
    table = table_of(model)
    assert not table[0].any()
    squares = table[1:].square().sum(dim=1)
    # Each is chi-square with 100 degrees over 100: their mean is within 5 standard errors of 1.
    assert abs(float(squares.mean()) - 1.0) < 5 * (2 / 100 / 399) ** 0.5
    assert model.notes == ("The embedding is random, drawn from the model's seed, and frozen.",)


def test_a_learned_embedding_is_trained_and_says_so() -> None:
    model = model_of(embedding="learned")
    assert model.shapes["embedding.weight"] == (6, 3)
    assert "trained with the rest" in model.notes[0]


def test_the_second_biases_of_the_lstm_stay_at_zero() -> None:
    model = model_of()
    seconds = [name for name, _ in model.module.named_parameters() if "bias_hh" in name]
    assert len(seconds) == 2
    for name in seconds:
        assert name not in model.shapes
        assert not model.module.get_parameter(name).any()


def test_word_vectors_stand_at_the_entries_of_their_words(tmp_path: Path) -> None:
    model = model_of_files(files(tmp_path))
    table, without = table_of(model), table_of(model_of())
    assert table[2].tolist() == [4.0, 5.0, 6.0]
    assert table[3].tolist() == [1.0, 2.0, 3.0]
    for entry in (0, 1, 4, 5):  # padding, unknown words, and the two that the file lacks
        assert torch.equal(table[entry], without[entry])
    assert "embedding.weight" not in model.shapes
    assert "vectors.txt (SHA-256 " in model.notes[0] and "2 of 4 words are not in it" in model.notes[0]


def test_a_list_of_other_words_or_in_another_order_is_refused(tmp_path: Path) -> None:
    right = digest(Path(str(files(tmp_path)["words_file"])))
    for words in (reversed(WORDS), ("!", *WORDS[1:])):
        with pytest.raises(
            ModelRefusedError, match="not the list of the words that the tokens of these data"
        ):
            model_of(right, **files(tmp_path, words="\n".join(words)))


def test_without_a_checksum_of_the_words_no_word_vectors_are_read(tmp_path: Path) -> None:
    with refused_as("words_unstated", ModelRefusedError):
        model_of(**files(tmp_path))


def test_a_model_of_an_embedding_file_is_made_again_without_it(tmp_path: Path) -> None:
    model = model_of_files(files(tmp_path))
    again = build("bilstm", input_shape=(5,), classes=2, seed=7, tokens=6, settings=model.settings)
    published = model.published_tensors(model.initial_parameters())
    tokens = torch.tensor([[0, 2, 3, 4, 5]])
    torch.testing.assert_close(
        again.outputs(published, tokens), model.outputs(model.by_name(model.initial_parameters()), tokens)
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("film 1 2 3\nsecret 1 2\n", "line 2 of vectors.txt has 2 numbers after the word, not 3"),
        ("2 3\nfilm 1 2 3\n", "line 1 of vectors.txt has 1 numbers"),
        ("film 1 2 secret\n", "line 1 of vectors.txt has a value that is not a finite number"),
        ("film 1 2 nan\n", "line 1 of vectors.txt has a value that is not a finite number"),
        ("secret 1 2 3\n", "none of the words"),
        ("", "none of the words"),
    ],
)
def test_a_file_of_another_form_is_refused_by_its_line_which_is_not_quoted(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(ModelRefusedError, match=message) as refusal:
        model_of_files(files(tmp_path, text))
    assert "secret" not in str(refusal.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("the\nfilm", "has 2 words, but the data's vocabulary has 4"),
        ("the\nfilm\nwas\nfine\nother", "has 5 words, but the data's vocabulary has 4"),
        ("the\nfilm\nfilm\nfine", "line 3 of words.txt"),
        ("the\n\nfilm\nfine", "line 2 of words.txt"),
    ],
)
def test_a_list_that_is_not_the_data_s_is_refused(tmp_path: Path, words: str, message: str) -> None:
    with pytest.raises(ModelRefusedError, match=message):
        model_of_files(files(tmp_path, words=words))


def test_a_file_that_is_not_there_or_no_text_is_refused(tmp_path: Path) -> None:
    named = files(tmp_path)
    (tmp_path / "vectors.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ModelRefusedError, match="embedding_file"):
        model_of_files(named)
    (tmp_path / "words.txt").unlink()
    with pytest.raises(ModelRefusedError, match="words_file"):
        model_of("0" * 64, **named)

"""A refusal is a code and values, which each front end words by itself."""

import pickle

import pytest

from algorithms.errors import QueryFailedError, RefusedError, Slot, Words

TOO_LARGE = "a clip norm of {asked:g} is above {largest}; lower {method.clip_norm}, or change {method.kind}."
COMMAND = Words({"method": "algorithm."}, {"method.kind": "algorithm.name"})
NOTEBOOK = Words(sentences={"too_large": "clip_norm={asked!r} is too large for {method.kind}."})


def too_large() -> RefusedError:
    """A refusal of a clip norm."""
    return RefusedError(TOO_LARGE, code="too_large", asked=3.0, largest=2)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (Words(), "a clip norm of 3 is above 2; lower clip_norm, or change the method."),
        (COMMAND, "a clip norm of 3 is above 2; lower algorithm.clip_norm, or change algorithm.name."),
        (NOTEBOOK, "clip_norm=3.0 is too large for the method."),
    ],
)
def test_a_front_end_names_settings_or_has_a_sentence_of_its_own(words: Words, sentence: str) -> None:
    assert words.sentence(too_large()) == sentence
    with pytest.raises(RefusedError) as refusal, words.wording_errors():
        raise too_large()
    assert str(refusal.value) == sentence
    assert (refusal.value.code, refusal.value.fields) == ("too_large", {"asked": 3.0, "largest": 2})


def test_the_outermost_front_end_has_the_last_word() -> None:
    with (
        pytest.raises(RefusedError, match=r"algorithm\.clip_norm"),
        COMMAND.wording_errors(),
        NOTEBOOK.wording_errors(),
    ):
        raise too_large()


def test_a_setting_can_be_a_field() -> None:
    refusal = RefusedError("leave {setting} empty.", code="both", setting=Slot("method.clip_norm"))
    assert (str(refusal), COMMAND.sentence(refusal)) == (
        "leave clip_norm empty.",
        "leave algorithm.clip_norm empty.",
    )


def test_a_sentence_without_a_code_is_taken_as_it_is() -> None:
    assert (
        COMMAND.sentence(RefusedError("no {slot} and no {method.name}.")) == "no {slot} and no {method.name}."
    )


def test_values_are_not_taken_for_slots() -> None:
    assert str(RefusedError("{name!r} is new.", code="new", name="{method.x}")) == "'{method.x}' is new."


def test_code_and_values_cross_processes() -> None:
    error = QueryFailedError("set {compute.memory_mb} above {mb}.", code="memory", mb=3)
    assert Words({"compute": "performance."}).sentence(pickle.loads(pickle.dumps(error))) == (
        "set performance.memory_mb above 3."
    )

"""What a privacy card says of a model that starts from a file: that model may be in it whole, with its own people.

A run says nothing of what its start was trained on, so its words hold for its own records alone: also where the run
has no noise, and where its records are public.
"""

from algorithms.privacy.card.parts import Text

STARTED: Text = (
    "The model starts from a file and may keep all of it: what that was trained on is not in this card, and its own"
    " cost and its own people count, too."
)
BESIDE: Text = (
    "what it cost to make the model that this one starts from is not in that number, and whoever was in both trainings"
    " loses both together"
)
_SHOWN = "who was in its training data is shown by it as far as its own card says"
_BOTH = (
    f"{_SHOWN}, and who was in both trainings by both together. The account of the population has the sum, where both"
    " were charged to it."
)


def is_started(of_model: str) -> bool:
    """Whether a model starts from a file, by its notes, as `models.start` writes them."""
    return "The start is the file " in of_model


def said_of(statement: str) -> str:
    """The statement of a run that promises nothing, with what it leaves out of the start."""
    return f"{statement} {STARTED}"


def without_start(statement: str) -> str:
    """The statement that `said_of` was given."""
    return statement.removesuffix(f" {STARTED}")


def protected(*, private: bool) -> str:
    """What follows on who is protected."""
    return f" But for the model that it starts from: {_BOTH}" if private else f" Of the start: {_SHOWN}."


def not_protected() -> str:
    """Who else is not protected by the run."""
    return (
        "Whoever was in the training data of the model that this one starts from, whether or not the records of this"
        " run are public: what protects them is in the card of that model."
    )


def last_word(*, private: bool) -> str:
    """What follows on what the owner decides about the run."""
    if private:
        return " Decide it for the people in the start, too: whoever gets this model gets what that one gives away."
    return (
        " Publish nothing of it either unless the model that it starts from may be published: what that was trained on"
        " is not in this card, and its own card, its cost and its people count, too."
    )

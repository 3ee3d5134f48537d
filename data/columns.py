"""The columns of a table, as its data card declares them: everything here is public."""

from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, StringConstraints, model_validator

Word: TypeAlias = Annotated[str, StringConstraints(min_length=1, pattern=r"^\S(.*\S)?$")]


class Strict(BaseModel):
    """A part of a card: no unknown keys, no silent conversions, no changes once it is read."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Numeric(Strict):
    """A number, clamped to `bounds` and scaled to [0, 1]; a missing one is refused or gets a set value."""

    name: Word
    kind: Literal["numeric"]
    bounds: tuple[FiniteFloat, FiniteFloat]
    missing: FiniteFloat | Literal["refuse"] = "refuse"

    @property
    def width(self) -> int:
        """Features this column becomes."""
        return 1

    @model_validator(mode="after")
    def _bounds_are_an_interval(self) -> "Numeric":
        low, high = self.bounds
        if not low < high:
            raise ValueError("bounds must be [low, high] with low below high")
        if self.missing != "refuse" and not low <= self.missing <= high:
            raise ValueError("the value that stands for a missing number must lie within the bounds")
        return self


class Categorical(Strict):
    """One of `categories`, one-hot; unknown and missing values share one more feature, 'other'."""

    name: Word
    kind: Literal["categorical"]
    categories: tuple[Word, ...] = Field(min_length=1)

    @property
    def width(self) -> int:
        """Features this column becomes."""
        return len(self.categories) + 1

    @model_validator(mode="after")
    def _categories_differ(self) -> "Categorical":
        if len(set(self.categories)) < len(self.categories):
            raise ValueError("a category is listed twice")
        return self


class Label(Strict):
    """The class of a record; `spellings` lists how the file writes a class, which by default is as it is."""

    name: Word
    kind: Literal["label"]
    spellings: dict[str, tuple[Word, ...]] = Field(default_factory=dict)

    @property
    def width(self) -> int:
        """Features this column becomes."""
        return 0


class Ignored(Strict):
    """A column of the file that nothing is made of."""

    name: Word
    kind: Literal["ignored"]

    @property
    def width(self) -> int:
        """Features this column becomes."""
        return 0


Column: TypeAlias = Annotated[Numeric | Categorical | Label | Ignored, Field(discriminator="kind")]

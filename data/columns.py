"""The columns of a table, as its data card declares them: everything here is public.

A column becomes features between 0 and 1 that add up to at most 1, which is what bounds a record (data.description).
"""

from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, StringConstraints, model_validator

Word: TypeAlias = Annotated[str, StringConstraints(min_length=1, pattern=r"^\S(.*\S)?$")]
MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")


class Strict(BaseModel):
    """A part of a card: no unknown keys, no silent conversions, no changes once it is read."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Numeric(Strict):
    """A number, clamped to `bounds` and scaled to [0, 1]; a missing one is refused or gets a set value.

    scale: linear, or log for a quantity over many orders of magnitude: log(1 + x - low) / log(1 + high - low).
    """

    name: Word
    kind: Literal["numeric"]
    bounds: tuple[FiniteFloat, FiniteFloat]
    scale: Literal["linear", "log"] = "linear"
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


class Binned(Strict):
    """A number by the interval it lies in, one-hot: an edge is the least number of the interval above it.

    missing: a missing number is refused, or has zeros in every feature.
    """

    name: Word
    kind: Literal["binned"]
    edges: tuple[FiniteFloat, ...] = Field(min_length=1)
    missing: Literal["refuse", "zeros"] = "refuse"

    @property
    def width(self) -> int:
        """Features this column becomes."""
        return len(self.edges) + 1

    @model_validator(mode="after")
    def _edges_rise(self) -> "Binned":
        if any(low >= high for low, high in zip(self.edges, self.edges[1:], strict=False)):
            raise ValueError("edges must rise")
        return self


class Categorical(Strict):
    """One of `categories`, one-hot.

    unknown: unknown and missing values share one more feature, 'other', or have zeros in every feature.
    """

    name: Word
    kind: Literal["categorical"]
    categories: tuple[Word, ...] = Field(min_length=1)
    unknown: Literal["other", "zeros"] = "other"

    @property
    def width(self) -> int:
        """Features this column becomes."""
        return len(self.categories) + (self.unknown == "other")

    @model_validator(mode="after")
    def _categories_differ(self) -> "Categorical":
        if len(set(self.categories)) < len(self.categories):
            raise ValueError("a category is listed twice")
        return self


class Date(Strict):
    """The day of the year, made of two other columns as 31 month + day and scaled from 32..403 to [0, 1].

    month, day: names of columns of the file. months: how the file writes the twelve months.
    """

    name: Word
    kind: Literal["date"]
    month: Word
    day: Word
    months: tuple[Word, ...] = Field(default=MONTHS, min_length=12, max_length=12)

    @property
    def width(self) -> int:
        """Features this column becomes."""
        return 1

    @model_validator(mode="after")
    def _months_differ(self) -> "Date":
        if len(set(self.months)) < len(self.months):
            raise ValueError("a month is listed twice")
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
    """A column of the file that nothing is made of by itself."""

    name: Word
    kind: Literal["ignored"]

    @property
    def width(self) -> int:
        """Features this column becomes."""
        return 0


Column: TypeAlias = Annotated[
    Numeric | Binned | Categorical | Date | Label | Ignored, Field(discriminator="kind")
]

"""The target of a data set: a class, a number, several labels, the next token of a text, or a tag for each word.

Readers, preparation, models, evaluation and predictions get the names, shape and type of labels from this one value.
"""

import math
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray
from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    FiniteFloat,
    PositiveInt,
    StringConstraints,
    Tag,
    model_validator,
)

from data.documents import contradiction

Word: TypeAlias = Annotated[str, StringConstraints(min_length=1, pattern=r"^\S(.*\S)?$")]
TargetKind: TypeAlias = Literal["class", "number", "count", "quantile", "labels", "next token", "tags"]
IGNORED = -100
"""The label of a position that does not count, as in PyTorch's losses."""


class CardPart(BaseModel):
    """A part of a card: no unknown keys, no silent conversions, immutable."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class _Target(CardPart):
    """kind: what is predicted. label_dtype: type of the labels for training."""

    kind: ClassVar[TargetKind]
    label_dtype: ClassVar[DTypeLike] = np.int64

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the model's outputs, in their order; empty if they have no names."""
        return ()

    @property
    def has_tokens(self) -> bool:
        """Whether there is a label for each token of a text."""
        return self.kind in ("next token", "tags")

    def outputs(self, tokens: int | None) -> int:
        """The number of a model's outputs, per token if there is a label for each token. tokens: size of the
        vocabulary.
        """
        return len(self.names)

    def label_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of one record's labels, for the shape of its features."""
        return input_shape if self.has_tokens else ()

    def align_labels(
        self, features: NDArray[Any], labels: NDArray[Any], padding: int
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """The features and labels of some records after an encoder; if labels are per token, they are made from the
        tokens.
        """
        return features, labels


class Classes(_Target):
    """One of several classes, by name; the label is its index."""

    kind: ClassVar[TargetKind] = "class"
    classes: tuple[Word, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return self.classes


class Number(_Target):
    """A number in the label's column, clamped to `bounds`, and scaled to [-1, 1] for training."""

    kind: ClassVar[TargetKind] = "number"
    label_dtype: ClassVar[DTypeLike] = np.float32
    bounds: tuple[FiniteFloat, FiniteFloat]

    def outputs(self, tokens: int | None) -> int:
        return 1

    @model_validator(mode="after")
    def _bounds_are_an_interval(self) -> "Number":
        if not 0 < 2 * (self.bounds[1] - self.bounds[0]) < math.inf:
            raise contradiction(
                "bounds must be [low, high] with low below high, and a finite distance", "bounds"
            )
        return self

    def scale(self, numbers: NDArray[np.float64]) -> NDArray[np.float32]:
        """Clamp numbers to the bounds and scale them to [-1, 1]."""
        low, high = self.bounds
        return (2.0 * (np.clip(numbers, low, high) - low) / (high - low) - 1.0).astype(np.float32)

    def in_units(self, scaled: NDArray[np.float64]) -> NDArray[np.float64]:
        """Clip a model's predictions to [-1, 1] and convert them to the original units.

        Example:
            >>> Number(bounds=(10.0, 30.0)).in_units(np.array([-2.0, 0.0])).tolist()
            [10.0, 20.0]
        """
        low, high = self.bounds
        numbers: NDArray[np.float64] = low + (np.clip(scaled, -1.0, 1.0) + 1.0) / 2.0 * (high - low)
        return numbers


class Count(Number):
    """How often something happened: the label's number from 0 to the upper bound; the model predicts its mean."""

    kind: ClassVar[TargetKind] = "count"
    counts: Literal[True]

    @model_validator(mode="after")
    def _starts_at_zero(self) -> "Count":
        if self.bounds[0] != 0.0:
            raise contradiction(
                "counts begin at 0; give bounds [0, high], or leave counts out", "counts", "bounds"
            )
        return self


class Quantile(Number):
    """A quantile of the label's number, such as 0.9: the number below which so many of similar records are."""

    kind: ClassVar[TargetKind] = "quantile"
    quantile: Annotated[FiniteFloat, Field(gt=0, lt=1)]


class Labels(_Target):
    """Any of several labels, each in a column of its name: a record has the label if the column holds one of `yes`.

    Any other value, including none, means that the record does not have the label.
    """

    kind: ClassVar[TargetKind] = "labels"
    label_dtype: ClassVar[DTypeLike] = np.float32
    labels: tuple[Word, ...]
    yes: tuple[Word, ...] = ("1", "1.0", "true", "True", "TRUE")

    @property
    def names(self) -> tuple[str, ...]:
        return self.labels

    def label_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        return (len(self.labels),)

    @model_validator(mode="after")
    def _labels_differ(self) -> "Labels":
        if len(self.labels) < 2 or len(set(self.labels)) < len(self.labels):
            raise contradiction(
                "give two labels or more, each once; for one label, give two classes", "labels"
            )
        return self


class NextToken(_Target):
    """The next token at each token of a text: language modelling. Padding does not count."""

    kind: ClassVar[TargetKind] = "next token"
    next: Literal["token"]

    def outputs(self, tokens: int | None) -> int:
        return tokens or 0

    def align_labels(
        self, features: NDArray[Any], labels: NDArray[Any], padding: int
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """The label of a position is its own token, as in other libraries; padding does not count."""
        return features, np.where(features == padding, IGNORED, features).astype(np.int64)


class Tags(_Target):
    """A tag for each word of a record, in lists of the same length; the first `words` words are used.

    A tag is given by its name or its index from 0. Any other value counts as `outside`, the tag of ordinary words, if
    it is declared; otherwise the word does not count.
    """

    kind: ClassVar[TargetKind] = "tags"
    tags: tuple[Word, ...]
    outside: Word | None = None
    words: PositiveInt = 256

    @property
    def names(self) -> tuple[str, ...]:
        return self.tags

    def align_labels(
        self, features: NDArray[Any], labels: NDArray[Any], padding: int
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """Separate tokens and word indices, [n, 2, length]; the first token of a word gets the word's tag from labels
        [n, words].

        A word index is -1 if a token is not the first of its word.
        """
        tokens, words = features[:, 0], features[:, 1]
        tags = np.take_along_axis(labels, np.clip(words, 0, labels.shape[1] - 1).astype(np.int64), axis=1)
        return tokens, np.where((words >= 0) & (words < labels.shape[1]), tags, IGNORED).astype(np.int64)

    @model_validator(mode="after")
    def _tags_differ(self) -> "Tags":
        if len(self.tags) < 2 or len(set(self.tags)) < len(self.tags):
            raise contradiction("give two tags or more, each once", "tags")
        if self.outside not in (None, *self.tags):
            raise contradiction("outside must be one of the tags", "outside", "tags")
        return self


def _form(value: Any) -> str | None:
    keys = value if isinstance(value, dict) else dict(value) if isinstance(value, BaseModel) else {}
    return next(
        (key for key in ("counts", "quantile", "bounds", "labels", "next", "tags") if key in keys), "bounds"
    )


Target: TypeAlias = Annotated[
    Annotated[Number, Tag("bounds")]
    | Annotated[Count, Tag("counts")]
    | Annotated[Quantile, Tag("quantile")]
    | Annotated[Labels, Tag("labels")]
    | Annotated[NextToken, Tag("next")]
    | Annotated[Tags, Tag("tags")],
    Discriminator(_form),
]
"""The targets that a card may declare instead of classes."""
LabelType: TypeAlias = Classes | Number | Labels | NextToken | Tags
"""All targets."""


def level_of(label_type: LabelType) -> float:
    """The level of a quantile; one half for other targets."""
    return label_type.quantile if isinstance(label_type, Quantile) else 0.5

"""What a data card may say about the form of its files: one small model for each reader."""

from typing import Annotated, Literal, TypeAlias

from pydantic import Field, NonNegativeInt, PositiveInt, StringConstraints, model_validator

from data.columns import Column, Date, Label, Strict, Word

Sha256: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Md5: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]


class Idx(Strict):
    """Four gzipped IDX files: train_images, train_labels, test_images, test_labels."""

    kind: Literal["idx"]


class Digits(Strict):
    """The digits that come with scikit-learn; `sha256` is that of the pixels and then the labels as bytes."""

    kind: Literal["digits"]
    sha256: Sha256


class Synthetic(Strict):
    """Records that are made up: features uniform in [0, 1], classes the two sides of a hyperplane through 0.

    features_seed, hyperplane_seed: of the generators. sha256: of what they must give, the features and the labels
    of the training records and then of the test records as bytes.
    """

    kind: Literal["synthetic"]
    features_seed: NonNegativeInt
    hyperplane_seed: NonNegativeInt
    sha256: Sha256


class SkipLines(Strict):
    """Lines to leave out at the top of each file."""

    train: NonNegativeInt = 0
    test: NonNegativeInt = 0


class Table(Strict):
    """What CSV and Parquet share: the columns, and the spellings of a missing value."""

    columns: tuple[Column, ...]
    missing: tuple[str, ...] = ("",)

    @property
    def width(self) -> int:
        """Features a record has."""
        return sum(column.width for column in self.columns)

    @property
    def label(self) -> Label:
        """The one column that holds the class."""
        return next(column for column in self.columns if isinstance(column, Label))

    @property
    def in_the_file(self) -> tuple[str, ...]:
        """Names of the columns that the file itself has, in the card's order."""
        return tuple(column.name for column in self.columns if not isinstance(column, Date))

    @model_validator(mode="after")
    def _dates_have_their_parts(self) -> "Table":
        known = {column.name for column in self.columns if not isinstance(column, Date | Label)}
        for column in self.columns:
            if isinstance(column, Date) and not {column.month, column.day} <= known:
                raise ValueError("month and day of a date must name columns of the file")
        return self

    @model_validator(mode="after")
    def _columns_make_a_table(self) -> "Table":
        names = [column.name for column in self.columns]
        if len(set(names)) < len(names):
            raise ValueError("a column is listed twice")
        if sum(isinstance(column, Label) for column in self.columns) != 1:
            raise ValueError("exactly one column must be of kind label")
        if self.width == 0:
            raise ValueError("at least one column must become a feature")
        return self


class Csv(Table):
    """Text in UTF-8, one record a line; without a header line the columns are in the card's order.

    quotes: whether fields may stand in double quotes. Off by default: a quote that one record opens would take the
    records after it along, up to the next quote. With quotes on, a field that holds a line break is refused.
    member: where the files are zip archives, the name of the text inside.
    """

    kind: Literal["csv"]
    separator: Annotated[str, StringConstraints(min_length=1, max_length=1, pattern=r"^[\x01-\x7f]$")] = ","
    header: bool = True
    quotes: bool = False
    member: Word | None = None
    skip_lines: SkipLines = SkipLines()


class Parquet(Table):
    """A Parquet file with (at least) the columns of the card."""

    kind: Literal["parquet"]


class Cifar(Strict):
    """Batches of coloured images in one `archive`, or in files of their own whose roles are their names.

    train, test: names of the batches, without an ending. labels: which of a record's labels is the class; "fine" is
    the second of two, and "only" says that there are no two.
    """

    kind: Literal["cifar"]
    train: tuple[Word, ...] = Field(min_length=1)
    test: Word
    labels: Literal["only", "fine"] = "only"

    @property
    def batches(self) -> frozenset[str]:
        """The names of all batches."""
        return frozenset((*self.train, self.test))


class Reviews(Strict):
    """Texts in a tar `archive`, one a file: .../train or test/CLASS/NUMBER_RATING.txt, in UTF-8.

    words: the member of the archive with the public list of words, one a line, the most frequent one first; without
    it the list is the file `words`. words_sha256: checksum of the words that have a token, a line each in the order of
    their tokens, as preparing writes them to words.txt; word vectors from a file need it. vocabulary: how many tokens
    there are, with those for padding and for unknown words. length: tokens of a record.
    """

    kind: Literal["reviews"]
    words: Word | None = None
    words_sha256: Sha256 | None = Field(default=None, exclude_if=lambda given: given is None)
    vocabulary: Annotated[int, Field(ge=3, lt=2**31)]
    length: PositiveInt


Format: TypeAlias = Annotated[
    Idx | Digits | Synthetic | Csv | Parquet | Cifar | Reviews, Field(discriminator="kind")
]

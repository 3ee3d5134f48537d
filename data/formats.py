"""The parts of a data card about columns, file formats and blocks; everything here is public.

A column becomes features between 0 and 1 that add up to at most 1, which bounds a record (data.description).
Each reader has a small model for the format of its files. Blocks say where the data of a growing population are.
"""

import codecs
import math
from datetime import date
from functools import cached_property
from typing import Annotated, Literal, TypeAlias

from pydantic import (
    AfterValidator,
    Field,
    FiniteFloat,
    JsonValue,
    NonNegativeInt,
    PositiveInt,
    StringConstraints,
    field_validator,
    model_validator,
)

from data.cells import Categories, CellEncoding, CellPart, CellSettings, Grids
from data.documents import contradiction
from data.targets import CardPart, Word

MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")


USUAL_MISSING = (
    "",
    "NA",
    "N/A",
    "n/a",
    "#N/A",
    "<NA>",
    "NaN",
    "nan",
    "NULL",
    "null",
    "None",
    "?",
    "-",
    "--",
    ".",
)
"""How tables usually write a missing value, none of which is a number or a day."""


class _Column(CardPart):
    name: Word

    @property
    def width(self) -> int:
        """Features this column becomes."""
        return 1

    @property
    def parts(self) -> tuple[CellPart, ...]:
        """What an encoding by cells is made of; empty if nothing is made of the column."""
        return ()


class Numeric(_Column):
    """A number, clamped to `bounds` and scaled to [0, 1]; a missing number is refused or replaced by the given value.

    scale: linear, or log for a quantity over many orders of magnitude: log(1 + x - low) / log(1 + high - low).
    """

    kind: Literal["numeric"]
    bounds: tuple[FiniteFloat, FiniteFloat]
    scale: Literal["linear", "log"] = "linear"
    missing: FiniteFloat | Literal["refuse"] = "refuse"

    @model_validator(mode="after")
    def _bounds_are_an_interval(self) -> "Numeric":
        low, high = self.bounds
        if not 0 < high - low < math.inf:
            raise contradiction(
                "bounds must be [low, high] with low below high, and a finite distance", "bounds"
            )
        if self.missing != "refuse" and not low <= self.missing <= high:
            raise contradiction(
                "the value that stands for a missing number must lie within the bounds", "missing", "bounds"
            )
        return self

    @property
    def parts(self) -> tuple[CellPart, ...]:
        return (Grids(self.bounds[1] - self.bounds[0]),)


class Binned(_Column):
    """A number, one-hot by its interval: an edge is the smallest number of the interval above it.

    missing: a missing number is refused, or all its features are zero.
    """

    kind: Literal["binned"]
    edges: tuple[FiniteFloat, ...] = Field(min_length=1)
    missing: Literal["refuse", "zeros"] = "refuse"

    @property
    def width(self) -> int:
        return len(self.edges) + 1

    @property
    def parts(self) -> tuple[CellPart, ...]:
        return (Categories(self.width, is_ordered=True),)

    @model_validator(mode="after")
    def _edges_rise(self) -> "Binned":
        if any(low >= high for low, high in zip(self.edges, self.edges[1:], strict=False)):
            raise contradiction("edges must rise", "edges")
        return self


class Categorical(_Column):
    """One of `categories`, one-hot.

    unknown: unknown and missing values share one more feature, 'other', or all their features are zero.
    ordered: whether the categories are in an order that means something, of which an encoding by cells makes use.
    """

    kind: Literal["categorical"]
    categories: tuple[Word, ...] = Field(min_length=1)
    unknown: Literal["other", "zeros"] = "other"
    # left out of a document if it is not given, so that the digests of cards without it do not change
    ordered: bool = Field(default=False, exclude_if=lambda value: not value)

    @property
    def width(self) -> int:
        return len(self.categories) + (self.unknown == "other")

    @property
    def parts(self) -> tuple[CellPart, ...]:
        return (Categories(len(self.categories), is_ordered=self.ordered),)

    @model_validator(mode="after")
    def _categories_differ(self) -> "Categorical":
        if len(set(self.categories)) < len(self.categories):
            raise contradiction("a category is listed twice", "categories")
        return self


class Hashed(_Column):
    """Text of many possible values, one-hot by a public hash into `cells`; values in one cell are taken for one.

    salt: of the hash; with another one, other values share a cell. A missing value has a feature of its own.
    """

    kind: Literal["hashed"]
    cells: Annotated[int, Field(ge=2, le=2**16)]
    salt: str = ""

    @property
    def width(self) -> int:
        return self.cells + 1

    @property
    def parts(self) -> tuple[CellPart, ...]:
        return (Categories(self.cells),)


Day: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}$")]


class Timestamp(_Column):
    """A date, or a date and a time, as ISO 8601 writes them; clamped to `bounds`, two days such as 2020-01-31.

    The feature is the share of the time between the bounds that has passed. An encoding by cells takes the year, the
    month and the weekday, too. missing: a missing or impossible date is refused, or takes the middle of the bounds; an
    encoding by cells has own cells for it.
    """

    kind: Literal["timestamp"]
    bounds: tuple[Day, Day]
    missing: Literal["refuse", "middle"] = "middle"

    @property
    def days(self) -> tuple[date, date]:
        """The bounds."""
        return date.fromisoformat(self.bounds[0]), date.fromisoformat(self.bounds[1])

    @property
    def years(self) -> range:
        """The years from the first bound to the last."""
        first, last = self.days
        return range(first.year, last.year + 1)

    @property
    def parts(self) -> tuple[CellPart, ...]:
        first, last = self.days
        elapsed = Grids(float((last - first).days), logarithmic=False)
        return Categories(len(self.years), is_ordered=True), Categories(12), Categories(7), elapsed

    @model_validator(mode="after")
    def _bounds_are_an_interval(self) -> "Timestamp":
        try:
            first, last = self.days
        except ValueError:
            raise contradiction(
                "bounds must be two days that there are, such as 2020-01-31", "bounds"
            ) from None
        if not first < last or len(self.years) > 200:
            raise contradiction(
                "bounds must be [first, last] with first before last, 200 years apart at most", "bounds"
            )
        return self


class Date(_Column):
    """The day of the year, computed from two other columns as 31 month + day and scaled from 32..403 to [0, 1].

    month, day: names of columns of the file. months: how the file writes the twelve months.
    """

    kind: Literal["date"]
    month: Word
    day: Word
    months: tuple[Word, ...] = Field(default=MONTHS, min_length=12, max_length=12)

    @property
    def parts(self) -> tuple[CellPart, ...]:
        return Categories(12), Grids(372.0, logarithmic=False)

    @model_validator(mode="after")
    def _months_differ(self) -> "Date":
        if len(set(self.months)) < len(self.months):
            raise contradiction("a month is listed twice", "months")
        return self


class Label(_Column):
    """The class of a record; `spellings` lists how the file writes a class, by default its name."""

    kind: Literal["label"]
    spellings: dict[str, tuple[Word, ...]] = Field(default_factory=dict)

    @property
    def width(self) -> int:
        return 0


class Ignored(_Column):
    """A column of the file from which no feature is made directly.

    categories: values by which metrics of private held-out records may be given, although the model does not see them.
    """

    kind: Literal["ignored"]
    categories: tuple[Word, ...] = Field(default=(), exclude_if=lambda value: not value)

    @property
    def width(self) -> int:
        return 0

    @model_validator(mode="after")
    def _categories_differ(self) -> "Ignored":
        if len(set(self.categories)) < len(self.categories):
            raise contradiction("a category is listed twice", "categories")
        return self


Column: TypeAlias = Annotated[
    Numeric | Binned | Categorical | Hashed | Timestamp | Date | Label | Ignored, Field(discriminator="kind")
]


Sha256: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Separator: TypeAlias = Annotated[str, StringConstraints(min_length=1, max_length=1, pattern=r"^[\x01-\x7f]$")]
UTF_8 = "utf-8"


def _encoding_of_bytes(name: str) -> str:
    """The usual name of an encoding that is UTF-8, or has one byte for each character, of which 0 to 127 are ASCII.

    So that a separator or a quote is never part of another character.
    """
    try:
        usual = codecs.lookup(name).name.removesuffix("-sig")
        plain, others = bytes(range(128)), bytes(range(128, 256))
        fits = plain.decode(usual) == plain.decode("ascii") and len(others.decode(usual, "replace")) == 128
    except (LookupError, ValueError):
        fits = False
    if not fits:
        raise ValueError(
            "encoding must be utf-8, or one with a byte for each character, such as latin-1 or windows-1252;"
            " save a file of another one as UTF-8"
        )
    return usual


Encoding: TypeAlias = Annotated[str, AfterValidator(_encoding_of_bytes)]
Md5: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]


class Idx(CardPart):
    """Four gzipped IDX files: train_images, train_labels, test_images, test_labels."""

    kind: Literal["idx"]


class Digits(CardPart):
    """The digits that come with scikit-learn; `sha256` is the checksum of the pixels and then the labels as bytes."""

    kind: Literal["digits"]
    sha256: Sha256


class Synthetic(CardPart):
    """Synthetic records: features are uniform in [0, 1], classes are the two sides of a hyperplane through 0.

    features_seed, hyperplane_seed: seeds of the generators. sha256: checksum of the expected features and labels, first
    of the training records and then of the test records, as bytes.
    """

    kind: Literal["synthetic"]
    features_seed: NonNegativeInt
    hyperplane_seed: NonNegativeInt
    sha256: Sha256


class SkipLines(CardPart):
    """Lines to leave out at the top of each file."""

    train: NonNegativeInt = 0
    test: NonNegativeInt = 0


class Table(CardPart):
    """The common part of CSV and Parquet: the columns, and the spellings of a missing value.

    cells: instead of a feature for each number and category, the cells that a row activates; see `data.cells`. A
    missing value then has cells of its own, whatever replaces it otherwise, except where it is refused.
    """

    columns: tuple[Column, ...]
    missing: tuple[str, ...] = ("",)
    # left out of a document if it is not given, so that the digests of cards without it do not change
    cells: CellSettings | None = Field(default=None, exclude_if=lambda value: value is None)

    @property
    def width(self) -> int:
        """Features a record has without cells."""
        return sum(column.width for column in self.columns)

    @cached_property
    def cell_encoding(self) -> CellEncoding | None:
        """The encoding of the columns by cells; None if the card declares none."""
        if self.cells is None:
            return None
        return CellEncoding(self.cells, tuple(column.parts for column in self.columns if column.parts))

    @property
    def label_columns(self) -> tuple[Label, ...]:
        """The column that holds the class, or those of several labels."""
        return tuple(column for column in self.columns if isinstance(column, Label))

    @property
    def in_the_file(self) -> tuple[str, ...]:
        """Names of the columns that the file itself has, in the card's order."""
        return tuple(column.name for column in self.columns if not isinstance(column, Date))

    @property
    def content(self) -> tuple[str, ...]:
        """Names of the columns of the file from which a record's features are made."""
        names = [c.name for c in self.columns if not isinstance(c, Date | Ignored | Label)]
        parts = [part for c in self.columns if isinstance(c, Date) for part in (c.month, c.day)]
        return tuple(sorted({*names, *parts}))

    @model_validator(mode="after")
    def _dates_have_their_parts(self) -> "Table":
        names = {column.name for column in self.columns if not isinstance(column, Date | Label)}
        for column in self.columns:
            if isinstance(column, Date) and not {column.month, column.day} <= names:
                raise contradiction("month and day of a date must name columns of the file", "columns")
        return self

    @model_validator(mode="after")
    def _columns_make_a_table(self) -> "Table":
        names = [column.name for column in self.columns]
        if len(set(names)) < len(names):
            raise contradiction("a column is listed twice", "columns")
        if not self.label_columns:
            raise contradiction("exactly one column must be of kind label", "columns")
        if self.width == 0:
            raise contradiction("at least one column must become a feature", "columns")
        return self


class Csv(Table):
    """Text, one record per line; without a header line the columns are in the card's order.

    quotes: whether fields may be in double quotes (RFC 4180). A quote that one record opens could extend over the
    following records up to the next quote, so a field with a line break is refused. With false, quotes are ordinary
    characters.
    decimal: the mark before the decimals of numbers. encoding: of the text, UTF-8 or one with a byte for each
    character, such as latin-1; a byte that it lacks is a character of its own, which no category has.
    member: if the files are zip archives, the name of the text inside.
    """

    kind: Literal["csv"]
    separator: Separator = ","
    decimal: Literal[".", ","] = Field(default=".", exclude_if=lambda value: value == ".")
    encoding: Encoding = Field(default=UTF_8, exclude_if=lambda value: value == UTF_8)
    header: bool = True
    quotes: bool = True
    member: Word | None = None
    skip_lines: SkipLines = SkipLines()


class Parquet(Table):
    """A Parquet file with (at least) the columns of the card."""

    kind: Literal["parquet"]


class Cifar(CardPart):
    """Batches of coloured images in one `archive`, or in separate files whose roles are their names.

    train, test: names of the batches, without a suffix. labels: which of a record's labels is the class; "fine" is the
    second of two, and "only" means that there is a single label.
    """

    kind: Literal["cifar"]
    train: tuple[Word, ...] = Field(min_length=1)
    test: Word
    labels: Literal["only", "fine"] = "only"

    @property
    def batches(self) -> frozenset[str]:
        """The names of all batches."""
        return frozenset((*self.train, self.test))


class Reviews(CardPart):
    """Texts in a tar `archive`, one per file: .../train or test/CLASS/NUMBER_RATING.txt, in UTF-8.

    words: the member of the archive with the public list of words, one per line, most frequent first; without it, the
    list is the file `words`. words_sha256: checksum of the words that have a token, one per line in the order of their
    tokens, as the prepare stage writes them to words.txt; word vectors from a file need it. vocabulary: the number of
    tokens, including those for padding and for unknown words. length: the number of tokens of a record.
    """

    kind: Literal["reviews"]
    words: Word | None = None
    words_sha256: Sha256 | None = Field(default=None, exclude_if=lambda value: value is None)
    vocabulary: Annotated[int, Field(ge=3, lt=2**31)]
    length: PositiveInt


class Datasets(Table):
    """A split of a Hugging Face data set as `save_to_disk` writes it: a folder of Arrow files with state.json."""

    kind: Literal["datasets"]


class Pixels(CardPart):
    """The settings of readers of images, which `Images` describes."""

    mode: Literal["RGB", "L"]
    fit: Literal["stretch", "crop"] = "stretch"
    most_pixels: Annotated[int, Field(ge=1, le=150_000_000)] = 50_000_000
    stand_in: Annotated[FiniteFloat, Field(ge=0, le=1)] = 0.5

    @property
    def channels(self) -> int:
        """The number of channels in this mode."""
        return len(self.mode)


class Images(Pixels):
    """Images in a folder with one subfolder per class, at any depth below it; other files are ignored.

    PNG and JPEG images are converted to the card's `shape` [channels, height, width].

    mode: RGB, or L for grey. fit: stretch resizes an image to that size, crop keeps its proportions and cuts out its
    middle. most_pixels: an image with more becomes the stand-in, as does one that cannot be read completely. stand_in:
    the brightness of that uniform image, in [0, 1].
    """

    kind: Literal["images"]


class Rows(CardPart):
    """Rows with named columns, including the label's, in a file or in the folder of `save_to_disk`.

    label: the column of the class, or the columns of several labels; none if the next token is predicted.

    format: csv has a header and one record per line, so that no record can affect the next one; use the other formats
    for texts with line breaks. jsonl has one object per line. encoding: of csv, as for tables. spellings: how the rows
    write a class, by default its name. An invalid line becomes the stand-in, with the first class.
    """

    format: Literal["csv", "jsonl", "parquet", "datasets"]
    label: Word | tuple[Word, ...] = ()
    spellings: dict[str, tuple[Word, ...]] = Field(default_factory=dict)
    separator: Separator = ","
    encoding: Encoding = Field(default=UTF_8, exclude_if=lambda value: value == UTF_8)

    @property
    def content(self) -> tuple[str, ...]:
        """Names of the columns from which a record's features are made."""
        raise NotImplementedError

    @property
    def label_columns(self) -> tuple[Label, ...]:
        """The label's columns, in the form of a table's."""
        names = (self.label,) if isinstance(self.label, str) else self.label
        return tuple(Label(name=name, kind="label", spellings=self.spellings) for name in names)

    @property
    def in_the_file(self) -> tuple[str, ...]:
        """Names of the columns that are read."""
        return (*self.content, *(label.name for label in self.label_columns))


class ImageTable(Pixels, Rows):
    """Images in the rows of a table: `image` is the column of their bytes, or of their paths.

    If the card's files have a folder `images`, the column has paths below that folder; a path outside of it is a
    missing image and becomes the stand-in. The rest is as for `images`.
    """

    kind: Literal["image_table"]
    image: Word

    @property
    def content(self) -> tuple[str, ...]:
        return (self.image,)


class Tokens(CardPart):
    """Words as tokens, from a public list in the file `words`, one per line, most frequent first.

    vocabulary, length, words_sha256: as for `reviews`.
    """

    vocabulary: Annotated[int, Field(ge=3, lt=2**31)]
    length: PositiveInt
    words_sha256: Sha256 | None = Field(default=None, exclude_if=lambda value: value is None)


class Texts(Rows):
    """Texts in one or more columns, joined by `join`.

    longest: how many characters of a text are kept. keep: whether they are kept from its start or its end. tokens: for
    models that read words; without it, the texts are for a text encoder. A text that is missing or not UTF-8 becomes
    the empty text.
    """

    kind: Literal["texts"]
    columns: tuple[Word, ...] = Field(min_length=1)
    join: str = " "
    longest: PositiveInt = 20_000
    keep: Literal["start", "end"] = "start"
    tokens: Tokens | None = None

    @property
    def content(self) -> tuple[str, ...]:
        return self.columns


class Own(CardPart):
    """Your own reader: `factory` is `package.module:factory`, which receives `settings` and returns a function.

    The function takes the files by role, or {"new": PATH} to predict on, and yields
    `data.readers.records.RecordChunk`s; it must process each record independently. source_sha256: checksum of all
    source files of its package and of what it imports from the project; write zeros first, and `epsilonflow data
    check` prints it. texts: whether the features are texts, for a text encoder.
    each_record_alone: the owner's declaration that it reads each record by itself; private records need it, since the
    reader cannot be tried on them, and the privacy card shows it.
    """

    kind: Literal["own"]
    factory: Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]
    source_sha256: Sha256
    settings: dict[str, JsonValue] = Field(default_factory=dict)
    texts: bool = False
    # In no document, so that the digests of cards and the ids of runs do not change when it is declared.
    each_record_alone: bool = Field(default=False, exclude=True)


Format: TypeAlias = Annotated[
    Idx | Digits | Synthetic | Csv | Parquet | Datasets | Cifar | Reviews | Images | ImageTable | Texts | Own,
    Field(discriminator="kind"),
]
OfRows: TypeAlias = Table | Texts | ImageTable
"""Formats that are read row by row."""
OF_ROWS = (Table, Texts, ImageTable)


Variable: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[A-Z][A-Z0-9_]*$")]


class Folder(CardPart):
    """One file per block in a folder below the project root; the file's name without its suffix is the block's name."""

    kind: Literal["folder"]
    path: Word

    @property
    def divides_by(self) -> str:
        """In words, what says of a record in which block it is."""
        return "the files of a folder"

    @field_validator("path")
    @classmethod
    def _is_below_the_root(cls, path: str) -> str:
        if path.startswith(("/", "~")) or ".." in path.split("/"):
            raise ValueError("path must be relative to the project root")
        return path


class Query(CardPart):
    """The rows of a query, one column of which names the block.

    url_from: the environment variable with the SQLAlchemy URL, which is never in a file. query: a SELECT. column: the
    query's column with the block's name; rows without a name are in no block. names: the declared blocks, if the names
    in the database should not be published; a declared block may have no rows, and rows with other names are in no
    block.
    """

    kind: Literal["sql"]
    url_from: Variable
    query: Annotated[str, StringConstraints(min_length=1)]
    column: Word
    names: tuple[Word, ...] = Field(default=(), exclude_if=lambda value: not value)

    @property
    def divides_by(self) -> str:
        """In words, what says of a record in which block it is."""
        return f"the column {self.column!r} of a query"


Source: TypeAlias = Annotated[Folder | Query, Field(discriminator="kind")]

"""The data card: all that is public about a data set, declared by its owner and never read off its rows."""

from typing import Annotated, Literal, TypeAlias

from pydantic import Field, FiniteFloat, PositiveInt, StringConstraints, model_validator

from data.columns import Strict, Word
from data.formats import Csv, Digits, Format, Idx, Sha256, Synthetic, Table

Url: TypeAlias = Annotated[str, StringConstraints(pattern=r"^https?://[^?#\s]+/[A-Za-z0-9][A-Za-z0-9._+-]*$")]
Name: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_-]*$")]
IDX_FILES = frozenset({"train_images", "train_labels", "test_images", "test_labels"})


class File(Strict):
    """A file by its public homes (`urls`, tried in turn) or by its `path` below the project root.

    saved_as: name of a file with urls on this machine, if not the name in which all its urls end.
    sha256: checksum of the file. keyed_sha256: for a private file, whose plain checksum would let anyone who
    sees the card test a guess of the whole file; only the holder of the owner key can compute this one.
    """

    urls: tuple[Url, ...] = ()
    path: Word | None = None
    saved_as: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$")] | None = None
    sha256: Sha256 | None = None
    keyed_sha256: Sha256 | None = None

    @property
    def name(self) -> str:
        """Name of the file, without folders."""
        return self.saved_as or (self.path or self.urls[0]).rsplit("/", 1)[-1]

    @model_validator(mode="after")
    def _says_where_and_what(self) -> "File":
        if bool(self.urls) == bool(self.path):
            raise ValueError("a file needs either urls or a path")
        if self.path and self.path.startswith(("/", "~")):
            raise ValueError("path must be relative to the project root")
        if self.path and self.saved_as:
            raise ValueError("only a file with urls can be saved_as")
        if self.saved_as is None and len({url.rsplit("/", 1)[-1] for url in self.urls}) > 1:
            raise ValueError("all urls must end in the same file name, or say what it is saved_as")
        if (self.sha256 is None) == (self.keyed_sha256 is None):
            raise ValueError("a file needs sha256, or keyed_sha256 if it is private")
        if self.urls and self.keyed_sha256:
            raise ValueError("a file that has urls needs sha256")
        return self


class Records(Strict):
    """How many records there are: public `train` and `test` counts, or only a bound on both together."""

    train: PositiveInt | None = None
    test: PositiveInt | None = None
    at_most: PositiveInt | None = None

    @model_validator(mode="after")
    def _counts_or_bound(self) -> "Records":
        counts = self.train is not None and self.test is not None and self.at_most is None
        bound = self.train is None and self.test is None and self.at_most is not None
        if not counts and not bound:
            raise ValueError("give train and test when the number of records is public, else only at_most")
        return self


class Cap(Strict):
    """What all runs on the population together may spend."""

    epsilon: Annotated[FiniteFloat, Field(gt=0)]
    delta: Annotated[FiniteFloat, Field(ge=0, le=1)]


class Composition(Strict):
    """How the runs on the population add up: basic sums, zCDP, or Rényi at an order that never changes."""

    kind: Literal["basic", "zcdp", "renyi"]
    order: Annotated[FiniteFloat, Field(gt=1)] | None = None

    @model_validator(mode="after")
    def _order_of_renyi_alone(self) -> "Composition":
        if (self.kind == "renyi") != (self.order is not None):
            raise ValueError("composition.order is needed for renyi, and only then")
        return self


class Split(Strict):
    """The per-record rule that sets a test set apart: a public salt and the expected test share."""

    salt: Word
    test_fraction: Annotated[FiniteFloat, Field(gt=0, lt=1)]


class DataCard(Strict):
    """A data set as its owner declares it; raises pydantic.ValidationError when parts do not fit together.

    folder: of its files in a mirror and among the downloads, if not its name; data sets may share one.
    composition: of the population's runs, fixed when it is first seen. blocks_per_person: in how many blocks of the
    population a person may have records; with 1, the unit of privacy is one record in one block.
    """

    name: Name
    folder: Name | None = None
    title: Word
    source: Word
    licence: Word
    citation: Word
    public: bool
    unit: Word
    population: Word
    cap: Cap
    composition: Composition = Composition(kind="basic")
    blocks_per_person: PositiveInt = 1
    holdout: Literal["public"]
    records: Records
    classes: tuple[Word, ...] = Field(min_length=2)
    shape: tuple[PositiveInt, ...] | None = None
    reader: Format
    files: dict[str, File] = Field(default_factory=dict)
    split: Split | None = None

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one record's features."""
        if isinstance(self.reader, Table):
            return (self.reader.width,)
        return self.shape or ()

    @model_validator(mode="after")
    def _files_fit_the_reader(self) -> "DataCard":
        roles = set(self.files)
        if isinstance(self.reader, Idx) and roles != IDX_FILES:
            raise ValueError(f"files of an idx reader must be {', '.join(sorted(IDX_FILES))}")
        if isinstance(self.reader, Digits | Synthetic) and roles:
            raise ValueError(f"the {self.reader.kind} reader takes no files")
        if isinstance(self.reader, Table) and roles not in ({"train"}, {"train", "test"}):
            raise ValueError("files of a table must be train, or train and test")
        if isinstance(self.reader, Csv) and self.reader.skip_lines.test and "test" not in roles:
            raise ValueError("reader.skip_lines.test needs a test file")
        return self

    @model_validator(mode="after")
    def _split_only_without_a_test_set(self) -> "DataCard":
        has_test_set = isinstance(self.reader, Synthetic) or bool(set(self.files) - {"train"})
        if has_test_set == (self.split is not None):
            raise ValueError("split is needed when the source has no test set, and only then")
        return self

    @model_validator(mode="after")
    def _classes_and_shape_fit(self) -> "DataCard":
        if len(set(self.classes)) < len(self.classes):
            raise ValueError("a class is listed twice")
        if isinstance(self.reader, Synthetic):
            _check_synthetic(self.shape, self.classes, self.records)
        if not isinstance(self.reader, Table):
            if self.shape is None:
                raise ValueError("shape is missing")
            return self
        if self.shape not in (None, self.input_shape):
            raise ValueError(
                f"shape is {list(self.shape or ())} but the columns make {list(self.input_shape)}"
            )
        _check_spellings(self.reader.label.spellings, self.classes)
        return self


def _check_synthetic(shape: tuple[int, ...] | None, classes: tuple[str, ...], records: Records) -> None:
    if len(shape or ()) != 1 or len(classes) != 2 or records.train is None:
        raise ValueError("the synthetic reader makes records of one axis and two classes, in public numbers")


def _check_spellings(spellings: dict[str, tuple[str, ...]], classes: tuple[str, ...]) -> None:
    if not set(spellings) <= set(classes):
        raise ValueError("the label column spells a class that classes does not list")
    written = [text for name in classes for text in spellings.get(name, (name,))]
    if len(set(written)) < len(written):
        raise ValueError("two classes share a spelling in the label column")

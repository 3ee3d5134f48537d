"""The data card: everything that is public about a data set, declared by its owner and never computed from its rows.

One card per data set, a YAML file with the set's name in `cards`.
"""

import json
from collections.abc import Mapping
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from posixpath import normpath
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    Field,
    FiniteFloat,
    PositiveInt,
    StringConstraints,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails

from data.deployment import Deployment
from data.documents import CONTRADICTION, Document, DocumentError, contradiction, load_yaml
from data.formats import (
    OF_ROWS,
    Cifar,
    Csv,
    Digits,
    Folder,
    Format,
    Idx,
    Ignored,
    Images,
    ImageTable,
    Md5,
    OfRows,
    Own,
    Pixels,
    Reviews,
    Rows,
    Sha256,
    Source,
    Synthetic,
    Table,
    Texts,
    Tokens,
)
from data.targets import CardPart, Classes, Labels, LabelType, NextToken, Tags, Target, Word

Url: TypeAlias = Annotated[str, StringConstraints(pattern=r"^https?://[^?#\s]+/[A-Za-z0-9][A-Za-z0-9._+-]*$")]
Name: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_-]*$")]
CARDS = Path(__file__).parent / "cards"
IDX_FILES = frozenset({"train_images", "train_labels", "test_images", "test_labels"})


DataFault: TypeAlias = Literal[
    "altered_file",  # its checksum is not the declared one
    "bad_block_names",
    "bad_card",  # keys: of the data card, which contradict each other or have a value that is not allowed
    "bad_output",  # a file to write to
    "bad_owner_key",
    "bad_value",  # of a record, which is no `expected`
    "block_held_out",
    "changing_file",
    "code_failed",  # the user's own reader or encoder
    "columns_not_kept",  # beside predictions
    "encoder_needed",
    "folds_unfit",
    "machine_fault",
    "missing_column",
    "missing_file",
    "missing_value",
    "no_blocks",
    "no_database",
    "no_records",
    "not_fetched",
    "not_prepared",
    "nothing_readable",
    "other_software",
    "out_of_memory",
    "preparation_unknown",  # of the records that a model was trained on
    "prepared_anew",
    "records_differ",  # from what the data card declares
    "too_many_records",
    "transform_unfit",
    "unknown_data_set",
    "unlike_card",  # a file, which another value of the card's `key` describes
    "unlike_training",  # records to predict on
    "unreadable_file",  # it is not of the format that it should have
]
"""What is wrong with a data set: kinds that a caller can act on, each of which may have several sentences."""


class DataRefusedError(ValueError):
    """A data set that cannot be used; the message says what was found, what is allowed and what to do.

    Neither the message nor the fields have a value of a record.

    Attributes:
        template: The message, with a slot `{name}` for each field that it shows.
        code: The kind of what is wrong, for callers and tests.
        fields: The values in the sentence, and others of its kind.

    Example:
        >>> error = DataRefusedError("there is no file {path}; put it there.", code="missing_file", path="a.csv")
        >>> str(error), error.code, error.fields
        ('there is no file a.csv; put it there.', 'missing_file', {'path': 'a.csv'})
    """

    def __init__(self, template: str, /, *, code: DataFault, **fields: object) -> None:
        super().__init__(template)
        self.template, self.code, self.fields = template, code, fields

    def __str__(self) -> str:
        return self.template.format_map(self.fields)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), code=self.code, **self.fields), self.args

    def with_more(self, sentence: str) -> "DataRefusedError":
        """The refusal with another sentence after its own."""
        return DataRefusedError(f"{self.template} {{more}}", code=self.code, **self.fields, more=sentence)


class File(CardPart):
    """A file to download from `urls` (tried in turn), a `path` below the project root, or a file of a mirror.

    path: may be a folder. Its checksum covers the names and contents of all files in it, except hidden files and
    folders, whose names begin with a dot.
    saved_as: the name of a downloaded file on this machine, if it differs from the end of its urls; or, without urls,
    the name of a file that only a mirror has. sha256: checksum of the file. keyed_sha256: for a private file, because
    with a plain checksum anyone who sees the card could test a guess of the whole file; only the holder of the owner
    key can compute it. md5: instead of sha256, for a file with urls whose publisher gives no other checksum.
    """

    urls: tuple[Url, ...] = ()
    path: Word | None = None
    saved_as: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$")] | None = None
    sha256: Sha256 | None = None
    keyed_sha256: Sha256 | None = None
    # left out of a document if it is not given, so that the digests of cards without it do not change
    md5: Md5 | None = Field(default=None, exclude_if=lambda value: value is None)

    @field_validator("sha256", "keyed_sha256", mode="before")
    @classmethod
    def _of_zeros(cls, value: object) -> object:
        """Accept 64 zeros, the placeholder for an unknown checksum, which YAML reads as a number."""
        return "0" * 64 if value == 0 else value

    @property
    def name(self) -> str:
        """Name of the file, without folders."""
        return self.saved_as or (self.path or self.urls[0]).rsplit("/", 1)[-1]

    @property
    def published_checksum(self) -> tuple[str, str]:
        """Kind and value of the checksum of a published file."""
        return ("md5", self.md5) if self.md5 else ("sha256", self.sha256 or "")

    @model_validator(mode="after")
    def _says_where_and_what(self) -> "File":
        if self.path and self.saved_as:
            raise contradiction(
                "only a file with urls, or one that a mirror has, can be saved_as", "path", "saved_as"
            )
        if bool(self.urls or self.saved_as) == bool(self.path):
            raise contradiction(
                "a file needs either urls or a path, or saved_as alone if only a mirror has it",
                "urls",
                "path",
            )
        if self.path and self.path.startswith(("/", "~")):
            raise contradiction("path must be relative to the project root", "path")
        if self.saved_as is None and len({url.rsplit("/", 1)[-1] for url in self.urls}) > 1:
            raise contradiction(
                "all urls must end in the same file name, or say what it is saved_as", "urls", "saved_as"
            )
        self._check_checksums()
        return self

    def _check_checksums(self) -> None:
        if sum(checksum is not None for checksum in (self.sha256, self.keyed_sha256, self.md5)) != 1:
            raise contradiction(
                "a file needs sha256, or keyed_sha256 if it is private, or md5 if it is published",
                "sha256",
                "keyed_sha256",
                "md5",
            )
        if self.keyed_sha256 and not self.path:
            raise contradiction("a file that has urls needs sha256", "keyed_sha256", "path")
        if self.md5 and not self.urls:
            raise contradiction("only a file with urls may have md5 in place of sha256", "md5", "urls")


class RecordCounts(CardPart):
    """How many records there are: public `train` and `test` counts, or only a bound on both together."""

    train: PositiveInt | None = None
    test: PositiveInt | None = None
    at_most: PositiveInt | None = None

    @model_validator(mode="after")
    def _counts_or_bound(self) -> "RecordCounts":
        counts = self.train is not None and self.test is not None and self.at_most is None
        bound = self.train is None and self.test is None and self.at_most is not None
        if not counts and not bound:
            raise contradiction(
                "give train and test when the number of records is public, else only at_most",
                "train",
                "test",
                "at_most",
            )
        return self


class Cap(CardPart):
    """What all runs on the population together may spend."""

    epsilon: Annotated[FiniteFloat, Field(gt=0)]
    delta: Annotated[FiniteFloat, Field(ge=0, le=1)]


class DeclaredComposition(CardPart):
    """How the runs on the population add up: basic sums, zCDP, or Rényi at an order that never changes.

    order: of Rényi. runs: instead of an order, how many runs like the first are planned; when the population is first
    used, the ledger then takes the order at which they cost least, or basic sums where that is better.
    """

    kind: Literal["basic", "zcdp", "renyi"]
    order: Annotated[FiniteFloat, Field(gt=1)] | None = None
    runs: Annotated[int, Field(ge=2)] | None = Field(default=None, exclude_if=lambda runs: runs is None)

    @model_validator(mode="after")
    def _order_or_runs_of_renyi_alone(self) -> "DeclaredComposition":
        if (self.kind == "renyi") != (self.order is not None or self.runs is not None):
            raise contradiction(
                "composition.order or composition.runs is needed for renyi, and only then",
                "kind",
                "order",
                "runs",
            )
        if None not in (self.order, self.runs):
            raise contradiction(
                "composition.runs chooses the order; give one of composition.order and composition.runs",
                "order",
                "runs",
            )
        return self


class SplitRule(CardPart):
    """The rule that decides for each record whether it is a test record: a public salt and the expected share.

    copies: whether equal records are all on one side, or each on a side of its own. `together` suits records that may
    be entered twice. `apart` suits tables in which many people have the same values: otherwise a model is tested on
    none of the combinations that it was trained on. With `person`, all records of a person are on one side.
    """

    salt: Word
    test_fraction: Annotated[FiniteFloat, Field(gt=0, lt=1)]
    copies: Literal["together", "apart"] = Field(
        default="together", exclude_if=lambda copies: copies == "together"
    )


class Person(CardPart):
    """The person whose record each row is, who is then the unit of privacy instead of the record.

    column: the column with the person's id, which is never a feature; 17.0 and 17 are one id. per_person: how many
    records of each person are used at most, chosen by a keyed hash; other records, and records that name nobody (an
    empty name, NaN, or what reader.missing lists), are left out. All records of a person are on one side of the split,
    and nobody in the test file is trained on. In training, the records of a person are one: the person is sampled, and
    the mean of the gradients is clipped. group_privacy: each record is sampled and clipped by itself instead, and every
    run is charged by group privacy for per_person records. In a population with blocks, all of this is per block.
    """

    column: Word
    per_person: PositiveInt = 1
    group_privacy: bool = False

    @model_validator(mode="after")
    def _group_needs_several(self) -> "Person":
        if self.group_privacy and self.per_person == 1:
            raise contradiction(
                "group_privacy is for several records a person; set per_person, or leave it out",
                "group_privacy",
                "per_person",
            )
        return self

    @property
    def rows_per_user(self) -> int | None:
        """How many records of a person are at most one training record; None if each is a separate record."""
        return None if self.per_person == 1 or self.group_privacy else self.per_person

    @property
    def group(self) -> int:
        """How many training records can belong to one person."""
        return self.per_person if self.group_privacy else 1


class DataCard(CardPart):
    """A data set as its owner declares it; raises pydantic.ValidationError if the parts do not fit together.

    name: of the data set, and of its file without `.yaml`. folder: the folder of its files in a mirror and among the
    downloads, if not its name; data sets may share one.
    title: of the data set, for people. source: where the records come from. licence: under which they may be used.
    citation: what to cite, or none. public: whether the records need no protection. unit: what one record is, and so
    what is protected, in words. population: the people; runs on all cards of a population share one budget. cap: what
    these runs may spend together. records: how many there are. reader: how files become records. files: by role, such
    as train and test. split: how held-out records are chosen where there is no file for them. shape: of an image,
    [channels, height, width].
    classes: names of the classes. target: instead of classes; for rows a number or several labels, for texts the next
    token or a tag for each word.
    costs: of two classes, what it costs to take a record of a class for one of the other; 1 for one that is not named.
    The cheapest threshold is chosen on what is released of held-out records.
    alternatives: other sets of files with the same records (if private, with the same test files), tried after `files`.
    composition: how the population's runs add up, fixed when it is first seen. blocks_per_person: the number of blocks
    in which a person may have one record each; with 1, the unit of privacy is one record in one block.
    blocks: where the training records are, for a population that grows block by block; `files` then has only a test
    file, or nothing. person: the column that names the person, if a person may have several records.
    deployment: for `epsilonflow card export`, who publishes models of the records and what for.
    holdout: whether the held-out records are private, like those that are trained on, and leave as one noised
    histogram, or declared public, so that exact metrics leave. holdout_why: why held-out records of a private data set
    are public, in a sentence.
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
    composition: DeclaredComposition = Field(
        default=DeclaredComposition(kind="basic"),
        exclude_if=lambda value: value == DeclaredComposition(kind="basic"),
    )
    blocks_per_person: PositiveInt = Field(default=1, exclude_if=lambda value: value == 1)
    holdout: Literal["public", "private"]
    holdout_why: Word | None = Field(default=None, exclude_if=lambda value: value is None)
    records: RecordCounts
    classes: tuple[Word, ...] = ()
    target: Target | None = Field(default=None, exclude_if=lambda value: value is None)
    # in no dump, since they change no model
    costs: dict[Word, Annotated[FiniteFloat, Field(gt=0)]] | None = Field(
        default=None, min_length=1, exclude=True
    )
    shape: tuple[PositiveInt, ...] | None = None
    reader: Format
    files: dict[str, File] = Field(default_factory=dict)
    alternatives: tuple[dict[str, File], ...] = Field(default=(), exclude_if=lambda value: not value)
    split: SplitRule | None = None
    blocks: Source | None = Field(default=None, exclude_if=lambda value: value is None)
    person: Person | None = Field(default=None, exclude_if=lambda value: value is None)
    # in no dump, since what models are used for changes no run
    deployment: Deployment | None = Field(default=None, exclude=True)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one record's features; () for texts that only an encoder can read."""
        if isinstance(self.reader, Table):
            encoding = self.reader.cell_encoding
            return (self.reader.width if encoding is None else len(encoding.facts.sizes),)
        if (tokens := self._tokens) is not None:
            return (tokens.length,)
        return self.shape or ()

    @property
    def has_texts(self) -> bool:
        """Whether the records are texts."""
        return isinstance(self.reader, Reviews | Texts) or (
            isinstance(self.reader, Own) and self.reader.texts
        )

    @property
    def _tokens(self) -> Reviews | Tokens | None:
        if isinstance(self.reader, Texts):
            return self.reader.tokens
        return self.reader if isinstance(self.reader, Reviews) else None

    @property
    def label_type(self) -> LabelType:
        """The target; the classes if the card declares no other."""
        return self.target or Classes.model_construct(classes=self.classes)

    @property
    def tokens(self) -> int | None:
        """The size of the vocabulary if features are tokens, else None."""
        return None if (tokens := self._tokens) is None else tokens.vocabulary

    @property
    def words_sha256(self) -> str | None:
        """Checksum of the words of the tokens, if it is declared."""
        return None if (tokens := self._tokens) is None else tokens.words_sha256

    @model_validator(mode="after")
    def _files_fit_the_reader(self) -> "DataCard":
        for files in (self.files, *self.alternatives):
            roles = set(files)
            if self.blocks is None:
                _check_roles(self.reader, roles)
            elif not isinstance(self.reader, OF_ROWS) or not roles - _beside(self.reader)[0] <= {"test"}:
                raise contradiction(
                    "blocks are of rows, and files beside them are a test file or none", "blocks", "files"
                )
            if isinstance(self.reader, Texts) and ("words" in roles) != (self.reader.tokens is not None):
                raise contradiction(
                    "reader.tokens needs a file `words`, the public list of words, and the file needs it",
                    "reader.tokens",
                    "files.words",
                )
            if isinstance(self.reader, Csv) and self.reader.skip_lines.test and "test" not in roles:
                raise contradiction(
                    "reader.skip_lines.test needs a test file", "reader.skip_lines.test", "files.test"
                )
            _check_different(files)
        if self.blocks is not None and self.records.at_most is None:
            raise contradiction(
                "blocks need records.at_most: how many records a run reads depends on its blocks",
                "blocks",
                "records.at_most",
            )
        test = self.files["test"].path if "test" in self.files else None
        folder = f"{normpath(self.blocks.path)}/" if isinstance(self.blocks, Folder) else None
        if test and folder and f"{normpath(test)}/".startswith(folder):
            raise contradiction(
                "the test file is in the folder of the blocks, to be trained on; move it elsewhere",
                "blocks.path",
                "files.test",
            )
        return self

    @model_validator(mode="after")
    def _split_only_without_a_test_set(self) -> "DataCard":
        beside = {"train", *_beside(self.reader)[0]}
        has_test_set = isinstance(self.reader, Synthetic) or bool(set(self.files) - beside)
        if has_test_set == (self.split is not None):
            raise contradiction(
                "split is needed when the source has no test set, and only then", "split", "files.test"
            )
        if self.split is not None and self.split.copies == "apart" and self.person is not None:
            raise contradiction(
                "all records of a person are on one side; leave split.copies out, or person if each row is a person",
                "split.copies",
                "person",
            )
        if self.split is not None and self.split.copies == "apart" and not isinstance(self.reader, Table):
            raise contradiction(
                "equal images or texts are on one side, whatever their labels; leave split.copies out",
                "split.copies",
                "reader.kind",
            )
        return self

    @model_validator(mode="after")
    def _holdout_fits_the_records(self) -> "DataCard":
        if self.public and self.holdout == "private":
            raise contradiction(
                "the records are public, so those held out are, too; set holdout to public",
                "public",
                "holdout",
            )
        if self.holdout_why is not None and (self.public or self.holdout == "private"):
            raise contradiction(
                "holdout_why is for held-out records of a private data set that are public",
                "holdout_why",
                "holdout",
            )
        if self.blocks is not None and self.split is None and self.holdout == "private":
            raise contradiction(
                "people in a test file are in no block, and every run evaluates them, so that no block's cap would"
                " count them; give split instead of the file, or declare the file public by holdout",
                "blocks",
                "files.test",
                "holdout",
            )
        return self

    @model_validator(mode="after")
    def _classes_and_shape_fit(self) -> "DataCard":
        if (self.target is None) != (len(self.classes) >= 2) or (self.target and self.classes):
            raise contradiction(
                "give two classes or more as classes, or a target where something else is predicted",
                "classes",
                "target",
            )
        if self.target is not None and not isinstance(self.reader, OF_ROWS):
            raise contradiction(
                "a target is a column of a table, or of the rows of texts or images", "target", "reader.kind"
            )
        if isinstance(self.reader, OF_ROWS):
            _check_labels(self.label_type, self.reader)
        if len(set(self.classes)) < len(self.classes):
            raise contradiction("a class is listed twice", "classes")
        if self.costs is not None and not (len(self.classes) == 2 and self.costs.keys() <= {*self.classes}):
            raise contradiction(
                "costs are of mistakes about two classes, by their names; name those, or leave costs out",
                "costs",
                "classes",
            )
        shape = self.shape or ()
        is_synthetic = len(shape) == 1 and len(self.classes) == 2 and self.records.train is not None
        if isinstance(self.reader, Synthetic) and not is_synthetic:
            raise contradiction(
                "the synthetic reader makes records of one axis and two classes, in public numbers",
                "reader.kind",
                "shape",
                "classes",
                "records",
            )
        if not self.input_shape and not self.has_texts:
            raise contradiction("shape is missing", "shape")
        if self.shape not in (None, self.input_shape):
            makers = "columns make" if isinstance(self.reader, Table) else "reader makes"
            raise contradiction(
                f"shape is {list(shape)} but the {makers} {list(self.input_shape)}", "shape", "reader"
            )
        if isinstance(self.reader, Pixels) and (len(shape) != 3 or shape[0] != self.reader.channels):
            form = f"[{self.reader.channels}, height, width]"
            raise contradiction(
                f"shape of images in mode {self.reader.mode} is {form}", "shape", "reader.mode"
            )
        if isinstance(self.reader, OF_ROWS):
            for label in self.reader.label_columns:
                _check_spellings(label.spellings, self.classes)
        return self

    @model_validator(mode="after")
    def _person_is_a_column(self) -> "DataCard":
        if self.person is not None:
            _check_person(self.person, self.reader)
            if self.person.group > 1 and self.blocks is not None:
                raise contradiction(
                    "a population in blocks has one record a person in each; leave group_privacy out, so that a"
                    " person's rows in a block are one",
                    "person.group_privacy",
                    "blocks",
                )
        return self


def _check_roles(reader: Format, roles: set[str]) -> None:
    if isinstance(reader, Idx) and roles != IDX_FILES:
        raise contradiction(
            f"files of an idx reader must be {', '.join(sorted(IDX_FILES))}", "files", "reader.kind"
        )
    if isinstance(reader, Digits | Synthetic) and roles:
        raise contradiction(f"the {reader.kind} reader takes no files", "files", "reader.kind")
    if isinstance(reader, Table) and roles not in ({"train"}, {"train", "test"}):
        raise contradiction("files of a table must be train, or train and test", "files", "reader.kind")
    if isinstance(reader, Images) and roles not in ({"train"}, {"train", "test"}):
        raise contradiction(
            "files of images must be train, or train and test, each the path of a folder",
            "files",
            "reader.kind",
        )
    beside = _beside(reader)
    if isinstance(reader, Rows) and roles - beside[0] not in ({"train"}, {"train", "test"}):
        raise contradiction(
            f"files of {reader.kind} must be train, or train and test{beside[1]}", "files", "reader.kind"
        )
    if isinstance(reader, Own) and not roles:
        raise contradiction("a reader of your own needs files, such as train", "files", "reader.kind")
    if isinstance(reader, Cifar) and roles not in ({"archive"}, reader.batches):
        raise contradiction(
            f"files of a cifar reader must be archive, or {', '.join(sorted(reader.batches))}",
            "files",
            "reader.kind",
        )
    if isinstance(reader, Reviews) and roles != ({"archive"} if reader.words else {"archive", "words"}):
        raise contradiction(
            "files of a reviews reader must be archive, and words unless reader.words names them",
            "files",
            "reader.kind",
        )


def _beside(reader: Format) -> tuple[set[str], str]:
    """Roles of files without rows, and their part of a refusal."""
    if isinstance(reader, Texts):
        return {"words"}, ", and words with reader.tokens"
    if isinstance(reader, ImageTable):
        return {"images"}, ", and images where its column has paths"
    return set(), ""


def _check_person(person: Person, reader: Format) -> None:
    if not isinstance(reader, OF_ROWS):
        raise contradiction(
            f"the reader {reader.kind} has no column that could name a person; leave person out",
            "person",
            "reader.kind",
        )
    if isinstance(reader, Table):
        ignored = [column.name for column in reader.columns if isinstance(column, Ignored)]
        if person.column not in ignored or person.column in reader.content:
            raise contradiction(
                f"person.column is {person.column!r} and must be a column of kind ignored, as nothing may be made of"
                " it; list it so under reader.columns",
                "person.column",
                "reader.columns",
            )
    elif person.column in reader.in_the_file:
        raise contradiction(
            "person.column must be a column of its own, as nothing may be made of it",
            "person.column",
            "reader",
        )


def _check_different(files: Mapping[str, File]) -> None:
    """Refuse equal files. Checksums of zeros are placeholders and may be equal."""
    paths = [normpath(file.path) for file in files.values() if file.path]
    for kind in ("sha256", "keyed_sha256", "md5"):
        sums = [
            checksum for file in files.values() if (checksum := getattr(file, kind)) and checksum.strip("0")
        ]
        if len(set(sums)) < len(sums) or len(set(paths)) < len(paths):
            raise contradiction(
                "two of the files are the same, and records to train on cannot be those to test on; name another file,"
                " or leave the test file out and declare a split",
                "files",
            )


def _check_labels(label_type: LabelType, reader: OfRows) -> None:
    """Check that the rows have the label columns that the target needs."""
    names = [label.name for label in reader.label_columns]
    if isinstance(label_type, Labels):
        if sorted(names) != sorted(label_type.labels):
            raise contradiction(
                "the columns of the label must be those that target.labels names, each once",
                "target.labels",
                "reader",
            )
        return
    if isinstance(label_type, NextToken | Tags) and not isinstance(reader, Texts):
        raise contradiction(f"the target of {label_type.kind} is for texts", "target", "reader.kind")
    if isinstance(label_type, NextToken) and names:
        raise contradiction(
            "where the next token is predicted there is no label; leave it out", "target", "reader.label"
        )
    if (
        isinstance(label_type, Tags)
        and isinstance(reader, Texts)
        and (len(reader.columns) > 1 or reader.tokens)
    ):
        raise contradiction(
            "tags are of the words in one column, which a tokenizer takes; leave the others out",
            "target",
            "reader.columns",
        )
    if not isinstance(label_type, NextToken) and len(names) != 1:
        raise contradiction(
            "exactly one column must be of kind label"
            if isinstance(reader, Table)
            else "label must be one column",
            "reader",
        )


def _check_spellings(spellings: dict[str, tuple[str, ...]], classes: tuple[str, ...]) -> None:
    if not set(spellings) <= set(classes):
        raise contradiction("the label column spells a class that classes does not list", "classes", "reader")
    written = [text for name in classes for text in spellings.get(name, (name,))]
    if len(set(written)) < len(written):
        raise contradiction("two classes share a spelling in the label column", "classes", "reader")


def card_names(folder: Path = CARDS) -> tuple[str, ...]:
    """Names of the data sets that have a card in `folder`, sorted."""
    return tuple(sorted(path.stem for path in folder.glob("*.yaml")))


def data_card(name: str, folder: Path = CARDS) -> DataCard:
    """Load the card of the data set `name`.

    Raises DataRefusedError if there is no such card, or if it is invalid; the message then has the path of the faulty
    key.
    """
    if name not in card_names(folder):
        names = ", ".join(card_names(folder))
        remedy = f"choose one of: {names}, or add a card to" if names else "add its card, the first one, to"
        raise DataRefusedError(
            "there is no data set {name!r}; {remedy} {folder}.",
            code="unknown_data_set",
            name=name,
            remedy=remedy,
            folder=folder,
            known=card_names(folder),
        )
    path = folder / f"{name}.yaml"
    document = _document(path)
    try:
        declared = DataCard.model_validate_json(json.dumps(document))
    except ValidationError as error:
        raise _bad_card(path, document, error.errors()) from None
    if declared.name != name:
        raise DataRefusedError(
            "data card {path}, key name: must be {name!r}, the name of the file; correct it.",
            code="bad_card",
            path=path,
            name=name,
            keys=("name",),
        )
    return declared


def _document(path: Path) -> Document:
    try:
        document = load_yaml(path.read_text(encoding="utf-8"))
    except DocumentError as error:
        raise DataRefusedError(
            "data card {path} {problem}; correct it.",
            code="unreadable_file",
            path=path,
            problem=error,
            fault=error.code,
        ) from None
    except UnicodeDecodeError:
        raise DataRefusedError(
            "data card {path} must hold plain UTF-8 text; correct it.", code="unreadable_file", path=path
        ) from None
    if not isinstance(document, dict):
        raise DataRefusedError(
            "data card {path} must be a mapping of keys to values; correct it.",
            code="unreadable_file",
            path=path,
        )
    return document


def _bad_card(path: Path, document: object, errors: list[ErrorDetails]) -> DataRefusedError:
    """The refusal of the first of the errors that pydantic found in a card."""
    # A misspelt key is two errors, one that is missing and one that is unknown: they become one refusal.
    first, *others = errors
    unknown = [str(other["loc"][-1]) for other in others if other["type"] == "extra_forbidden"]
    meant = get_close_matches(str(first["loc"][-1]), unknown, 1) if first["type"] == "missing" else []
    if meant:
        return DataRefusedError(
            "data card {path}, key {key}: unknown key; {meant} is its name, correct the card.",
            code="bad_card",
            path=path,
            key=meant[0],
            keys=(meant[0],),
            meant=first["loc"][-1],
        )
    no_group = "should be keys with values"
    messages = {
        "extra_forbidden": "unknown key",
        "missing": "is missing",
        "model_type": no_group,
        "dict_type": no_group,
    }
    message = messages.get(first["type"], first["msg"])
    key = _key(document, first["loc"], is_missing=first["type"] == "missing")
    where = f", key {key}" if key else ""
    contradicting = first["ctx"]["keys"] if first["type"] == CONTRADICTION else ("",)
    return DataRefusedError(
        "data card {path}{where}: {message}; correct the card.",
        code="bad_card",
        path=path,
        where=where,
        message=message.removeprefix("Value error, "),
        keys=tuple(".".join(filter(None, (key, inner))) for inner in contradicting),
    )


def _key(document: Any, location: tuple[int | str, ...], *, is_missing: bool) -> str:
    """The path of a key as in the document, without pydantic's tags of unions."""
    parts: list[str] = []
    for position, part in enumerate(location):
        keys = range(len(document)) if isinstance(document, list) else document
        inside = isinstance(document, dict | list) and part in keys
        if inside or (is_missing and position == len(location) - 1):
            parts.append(str(part))
        if inside:
            document = document[part]
    return ".".join(parts)

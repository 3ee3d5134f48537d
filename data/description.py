"""The public facts of a data set, which are all that an algorithm may know: only what the data card declares.

Also a digest of the rule by which records are held out, to which a population can be bound.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod, sqrt
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, TypeAdapter, ValidationError

from data.card import DataCard, DataRefusedError, File, SplitRule
from data.cells import CellColumn, CellFacts
from data.formats import (
    Categorical,
    Cifar,
    Digits,
    Format,
    Ignored,
    Images,
    ImageTable,
    Own,
    Reviews,
    Rows,
    Synthetic,
    Table,
    Texts,
)
from data.targets import Classes, LabelType, Target

SCALES, ANGLES = 2, 8
_PATHS = 1 + SCALES * ANGLES + SCALES * (SCALES - 1) // 2 * ANGLES**2
_SMALLEST_SIDE = 8


def rule_of(card: DataCard) -> str:
    """SHA-256 in hex of everything in a card that can move a record between the training and the held-out side.

    If the card has a split, this is the salt and the test fraction, and what an encoded record depends on, such as
    bounds, categories and classes. Otherwise it is the checksums of the files with test records. The digest depends
    only on the card: if the card has `alternatives` with other test files, DataRefusedError is raised, since the
    available files would decide.
    """
    decides = _of_the_files(card) if card.split is None else _of_the_split(card, card.split)
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()


def _of_the_split(card: DataCard, rule: SplitRule) -> dict[str, object]:
    """Here and below, keys with their default values are left out, so that keys that are added later change no rule."""
    split = rule.model_dump(mode="json", exclude_defaults=True)
    if card.person is not None:
        return {"split": split, "person": card.person.column}
    if isinstance(card.reader, Images | ImageTable | Texts):  # the bytes of their files decide
        columns = card.reader.content if isinstance(card.reader, Rows) else ()
        return {"split": split, "kind": card.reader.kind, "columns": columns, **_writing(card.reader)}
    return {
        "split": split,
        "encoding": _encoding(card.reader),
        "classes": card.classes,
        "shape": (card.reader.width,) if isinstance(card.reader, Table) else card.input_shape,
        **({} if card.target is None else {"target": card.target.model_dump(mode="json")}),
        **(
            {"copies differ in": _copies(card.reader)}
            if rule.copies == "apart" and isinstance(card.reader, Table)
            else {}
        ),
    }


def _copies(reader: Table) -> dict[str, object]:
    """What, beside what decides a record's own side, decides which records are copies of each other."""
    ignored = [column for column in reader.columns if isinstance(column, Ignored)]
    groups = {column.name: sorted(column.categories) for column in ignored if column.categories}
    return {"cells": reader.cells is not None, "groups": groups}


def _encoding(reader: Format) -> object:
    if not isinstance(reader, Table):
        # The digests that are left out move no record.
        return reader.model_dump(
            mode="json", exclude_defaults=True, exclude={"words_sha256", "source_sha256"}
        )
    read = [column for column in reader.columns if not isinstance(column, Ignored)]
    columns = [column.model_dump(mode="json", exclude_defaults=True) for column in read]
    return {"columns": columns, "missing": sorted(set(reader.missing)), **_writing(reader)}


def _writing(reader: Format) -> dict[str, object]:
    """How a text's bytes become characters and numbers, where it is not as usual."""
    return reader.model_dump(include={"decimal", "encoding"}, exclude_defaults=True)


def _of_the_files(card: DataCard) -> dict[str, object]:
    if any(_holdout_checksums(files) != _holdout_checksums(card.files) for files in card.alternatives):
        raise DataRefusedError(
            "the alternatives of the private data set {dataset!r} have other test files than its files, so that"
            " records trained on could be published as held out; give them the same checksums, or leave them out.",
            code="bad_card",
            dataset=card.name,
            keys=("alternatives",),
        )
    names_its_part = isinstance(card.reader, Cifar | Digits | Own | Reviews | Synthetic)
    held_out = {
        "files": _holdout_checksums(card.files),
        "reader": _encoding(card.reader) if names_its_part else None,
    }
    return held_out if card.person is None else held_out | {"person": card.person.column}


def _holdout_checksums(files: Mapping[str, File]) -> dict[str, str | None]:
    """The checksums by role, without files that have only training records, or no records."""
    test = {role: file for role, file in files.items() if role.split("_")[0] not in ("train", "images")}
    return {role: file.sha256 or file.keyed_sha256 or file.md5 for role, file in test.items()}


Transform: TypeAlias = Literal["none", "scattering", "encoder"]


@dataclass(frozen=True)
class EncoderFacts:
    """The public facts of a frozen encoder: its name and settings, its number of features, its weights.

    settings: as JSON text. pretrained_on: according to its author, or "unknown". tokens, padding: for a tokenizer, the
    size of its vocabulary, and the padding token.
    """

    name: str
    takes: Literal["images", "texts"]
    width: int
    sha256: str
    pretrained_on: str
    settings: str
    tokens: Annotated[int | None, Field(exclude_if=lambda value: value is None)] = None
    padding: Annotated[int, Field(exclude_if=lambda value: value == 0)] = 0


@dataclass(frozen=True)
class GroupColumn:
    """A column of declared categories, by which metrics of private held-out records may be given.

    start: the first of its features; for rows that are encoded as cells, its position in a row; None for a column from
    which no feature is made.
    """

    name: str
    values: tuple[str, ...]
    start: int | None


@dataclass(frozen=True)
class DatasetInfo:
    """The public facts of a prepared data set.

    Attributes:
        dataset, title, source, licence: As on the data card.
        is_public: Whether the records themselves are public.
        unit: What one record is, the unit of privacy.
        population: The population whose budget is charged.
        cap_epsilon, cap_delta: The cap of that budget when it is first used.
        classes: Their names, in the order of labels; empty without classes.
        records, test_records: The numbers of training and test records, or None if they are private.
        input_shape: Shape of one record's features.
        holdout: "public" means that the test records are declared public, "private" that they leave as one noised
            histogram alone.
        feature_norms: The largest L1 and L2 norms that a record's features can have, or None if they are unbounded.
        tokens: If features are tokens, int32 from 0, the size of the vocabulary including padding and unknown words;
            None for real features, float32.
        transform: How features are made from each record after it is read.
        composition, composition_order, composition_runs: How the population's runs add up; see
            `data.card.DeclaredComposition`.
        blocks_per_person: In how many blocks a person may have records.
        blocks: The blocks of the prepared records; empty for a population without blocks.
        holdout_rule: For private records, a digest of the rule by which records are held out; see `rule_of`.
        blocks_by: A description of what divides private records into blocks, or None.
        words_sha256: Checksum of the words of the tokens, in their order, if the card declares it; otherwise left out,
            so that the digest of other descriptions does not change.
        encoder: Its facts, if the transform is an encoder.
        per_person: How many training records can belong to one person, None if the card names no person column.
        rows_per_user: How many rows of a person are at most one training record; see `data.prepared`.
        reader_sha256: Of a reader of the owner's own, the digest of its source.
        target: What is predicted, if it is not a class.
        each_record_alone: Whether the owner declares that it reads each record by itself.
        cells: Of a table that is encoded as active cells, their layout; features are then the numbers of cells.
        holdout_why: Why test records of a private data set are public.
        groups: Of a table with private held-out records, the columns by which metrics may be given.
        costs: Of two classes, what it costs to take a record of the first, and of the second, for one of the other.
        cell_columns: Of an encoded table, the columns of which histograms may be learned.
    """

    dataset: str
    title: str
    source: str
    licence: str
    is_public: Annotated[bool, Field(alias="public")]
    unit: str
    population: str
    cap_epsilon: float
    cap_delta: float
    records: int | None
    input_shape: tuple[int, ...]
    classes: tuple[str, ...]
    test_records: int | None
    holdout: Literal["public", "private"]
    feature_norms: tuple[float, float] | None = None
    tokens: int | None = None
    transform: Transform = "none"
    composition: Literal["basic", "zcdp", "renyi"] = "basic"
    composition_order: float | None = None
    blocks_per_person: int = 1
    blocks: tuple[str, ...] = ()
    holdout_rule: str | None = None
    blocks_by: str | None = None
    words_sha256: Annotated[str | None, Field(exclude_if=lambda value: value is None)] = None
    encoder: Annotated[EncoderFacts | None, Field(exclude_if=lambda value: value is None)] = None
    per_person: Annotated[int | None, Field(exclude_if=lambda value: value is None)] = None
    rows_per_user: Annotated[int | None, Field(alias="pooled", exclude_if=lambda value: value is None)] = None
    reader_sha256: Annotated[str | None, Field(exclude_if=lambda value: value is None)] = None
    target: Annotated[Target | None, Field(exclude_if=lambda value: value is None)] = None
    composition_runs: Annotated[int | None, Field(exclude_if=lambda runs: runs is None)] = None
    each_record_alone: Annotated[bool, Field(exclude_if=lambda value: not value)] = False
    cells: Annotated[CellFacts | None, Field(exclude_if=lambda value: value is None)] = None
    holdout_why: Annotated[str | None, Field(exclude_if=lambda value: value is None)] = None
    groups: Annotated[tuple[GroupColumn, ...], Field(exclude_if=lambda value: not value)] = ()
    costs: Annotated[tuple[float, float] | None, Field(exclude_if=lambda value: value is None)] = None
    cell_columns: Annotated[tuple[CellColumn, ...], Field(exclude_if=lambda value: not value)] = ()

    @property
    def padding(self) -> int:
        """The padding token."""
        return 0 if self.encoder is None else self.encoder.padding

    @property
    def label_type(self) -> LabelType:
        """The target; the classes if the card declares no other."""
        return self.target or Classes.model_construct(classes=self.classes)

    @property
    def outputs(self) -> int:
        """The number of a model's outputs, per token if there is a label for each token."""
        return self.label_type.outputs(self.tokens)

    @property
    def label_shape(self) -> tuple[int, ...]:
        """Shape of one record's labels."""
        return self.label_type.label_shape(self.input_shape)

    @property
    def unseen_groups(self) -> tuple[str, ...]:
        """The columns of groups from which no feature is made."""
        return tuple(group.name for group in self.groups if group.start is None)

    @property
    def rows(self) -> tuple[int, ...]:
        """The leading dimension of a training record if it pools a person's rows; otherwise empty."""
        return () if self.rows_per_user is None else (self.rows_per_user,)

    def to_json(self) -> str:
        """The description as JSON text; depends only on the card, the transform and the names of the blocks."""
        return _ADAPTER.dump_json(self, indent=2, by_alias=True).decode() + "\n"

    @property
    def digest(self) -> str:
        """SHA-256 of the description; it covers only public facts, and no declaration that changes no record."""
        described = replace(self, each_record_alone=False, holdout_why=None, costs=None)
        return hashlib.sha256(described.to_json().encode()).hexdigest()

    def check_reader(self) -> None:
        """Raise DataRefusedError if private records come from a reader of the owner's own that is not declared.

        It cannot be tried on them: a refusal that depends on private records would say something about them.
        """
        if self.reader_sha256 is not None and not (self.is_public or self.each_record_alone):
            raise DataRefusedError(
                "the reader of the private data set {dataset!r} is its owner's own, and whether it reads each"
                " record by itself cannot be tried on private records; if no record changes what it makes of another,"
                " declare each_record_alone: true under reader in the data card.",
                code="bad_card",
                dataset=self.dataset,
                keys=("reader.each_record_alone",),
            )

    @staticmethod
    def read(folder: Path) -> "DatasetInfo":
        """The public facts of the prepared data in a folder; raises DataRefusedError if there are no prepared data."""
        try:
            text = (folder / "public.json").read_text(encoding="utf-8")
        except OSError:
            raise DataRefusedError(
                "{folder} holds no prepared data; run the prepare stage.", code="not_prepared", folder=folder
            ) from None
        return DatasetInfo.from_json(text)

    @staticmethod
    def from_json(text: str) -> "DatasetInfo":
        """Parse what `to_json` wrote; raises DataRefusedError if it is invalid."""
        try:
            return _ADAPTER.validate_json(text)
        except ValidationError:
            raise DataRefusedError(
                "the description of the prepared data is damaged; run the prepare stage again.",
                code="not_prepared",
            ) from None


_ADAPTER = TypeAdapter(DatasetInfo)


def dataset_info(
    card: DataCard,
    transform: Transform = "none",
    encoder: EncoderFacts | None = None,
) -> DatasetInfo:
    """The public facts that `card` declares.

    Args:
        card: The data card.
        transform: How features are made from each record after it is read.
        encoder: The encoder's facts, if the transform is one.

    Raises:
        DataRefusedError: If the card's records cannot have the transform.
    """
    is_as_read = transform == "none"
    tokens, is_bounded = encoder.tokens if encoder else card.tokens, not isinstance(card.reader, Own)
    return DatasetInfo(
        dataset=card.name,
        title=card.title,
        source=card.source,
        licence=card.licence,
        is_public=card.public,
        unit=card.unit,
        population=card.population,
        cap_epsilon=card.cap.epsilon,
        cap_delta=card.cap.delta,
        records=card.records.train,
        input_shape=_shape(card, transform, encoder),
        classes=card.classes,
        test_records=card.records.test,
        holdout=card.holdout,
        feature_norms=feature_norms(card) if is_as_read and tokens is None and is_bounded else None,
        tokens=tokens,
        transform=transform,
        composition=card.composition.kind,
        composition_order=card.composition.order,
        composition_runs=card.composition.runs,
        blocks_per_person=card.blocks_per_person * (1 if card.person is None else card.person.group),
        holdout_rule=None if card.public else rule_of(card),
        blocks_by=None if card.public or card.blocks is None else card.blocks.divides_by,
        words_sha256=None if encoder else card.words_sha256,
        encoder=encoder,
        per_person=None if card.person is None else card.person.group,
        rows_per_user=None if card.person is None else card.person.rows_per_user,
        reader_sha256=card.reader.source_sha256 if isinstance(card.reader, Own) else None,
        target=card.target,
        each_record_alone=isinstance(card.reader, Own) and card.reader.each_record_alone,
        cells=cells_of(card),
        cell_columns=_cell_columns(card),
        holdout_why=card.holdout_why,
        groups=_groups(card) if is_as_read and card.holdout == "private" else (),
        costs=_costs(card),
    )


def _costs(card: DataCard) -> tuple[float, float] | None:
    if card.costs is None:
        return None
    first, second = (card.costs.get(name, 1.0) for name in card.classes)
    return first, second


def _groups(card: DataCard) -> tuple[GroupColumn, ...]:
    """The columns of declared categories of a table, and where they are in a row."""
    if not isinstance(card.reader, Table):
        return ()
    groups, start = list[GroupColumn](), 0
    encoding = card.reader.cell_encoding
    for column in card.reader.columns:
        if isinstance(column, Categorical):
            groups.append(GroupColumn(column.name, column.categories, start))
        elif isinstance(column, Ignored) and column.categories:
            groups.append(GroupColumn(column.name, column.categories, None))
        start += column.width if encoding is None else encoding.positions_of(column.parts)
    return tuple(groups)


def _shape(card: DataCard, transform: Transform, encoder: EncoderFacts | None) -> tuple[int, ...]:
    if card.label_type.has_tokens and (encoder is None or encoder.tokens is None):
        raise DataRefusedError(
            "{dataset!r} has the target of {target}, which takes the tokens of a public model; name"
            " one by --encoder tokenizer/NAME.",
            code="encoder_needed",
            dataset=card.name,
            target=card.label_type.kind,
        )
    if transform == "none":
        if card.has_texts and card.tokens is None:
            raise DataRefusedError(
                "the records of {dataset!r} are texts that only an encoder can take; name one by --encoder, or"
                " declare reader.tokens in its card.",
                code="encoder_needed",
                dataset=card.name,
            )
        return card.input_shape
    if transform == "scattering":
        return scattered_shape(card)
    if encoder is None:
        raise DataRefusedError(
            "data.transform is encoder, and data.encoder names none; name one, or leave it at none.",
            code="encoder_needed",
        )
    is_text, is_image = card.has_texts, len(card.input_shape) == 3
    if (encoder.takes == "texts") != is_text or not (is_text or is_image):
        kind = "texts" if is_text else "images" if is_image else "tables"
        raise DataRefusedError(
            "the encoder {encoder!r} takes {takes}, and {dataset!r} has {kind}; name another encoder,"
            " or set data.transform to none.",
            code="transform_unfit",
            encoder=encoder.name,
            takes=encoder.takes,
            dataset=card.name,
            kind=kind,
        )
    return (encoder.width,)


def cells_of(card: DataCard) -> CellFacts | None:
    """The layout of the cells as which a card's table is encoded; None without such an encoding."""
    encoding = card.reader.cell_encoding if isinstance(card.reader, Table) else None
    return None if encoding is None else encoding.facts


def _cell_columns(card: DataCard) -> tuple[CellColumn, ...]:
    encoding = card.reader.cell_encoding if isinstance(card.reader, Table) else None
    return () if encoding is None else encoding.histograms


def feature_norms(card: DataCard) -> tuple[float, float]:
    """Largest L1 and L2 norms of a record's features, all of which are in [0, 1].

    In a table, the features of one column add up to at most 1, so the norms are largest if each column has one feature
    at 1. Otherwise every feature may be 1. A table that is encoded as cells has its vectors' norms.
    """
    if (cells := cells_of(card)) is not None:
        return cells.norms
    ones = prod(card.input_shape)
    if isinstance(card.reader, Table):
        ones = sum(column.width > 0 for column in card.reader.columns)
    return float(ones), sqrt(ones)


def scattered_shape(card: DataCard) -> tuple[int, int, int]:
    """Shape of one image's features after scattering: (81 channels, height // 4, width // 4).

    Raises DataRefusedError if the records are not images of at least 8 x 8 pixels.
    """
    shape = card.input_shape
    if len(shape) != 3 or min(shape[1:]) < _SMALLEST_SIDE:
        raise DataRefusedError(
            "scattering takes images of at least {smallest} x {smallest} pixels, but a record of "
            "{dataset!r} has the shape {shape}; set data.transform to none.",
            code="transform_unfit",
            smallest=_SMALLEST_SIDE,
            dataset=card.name,
            shape=list(shape),
        )
    channels, height, width = shape
    return _PATHS * channels, height // 2**SCALES, width // 2**SCALES

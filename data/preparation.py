"""How a model's records were prepared: the part of a data card that its file has, to prepare others like them.

`data.prepared` keeps it as preparation.json beside the records, and a model's file as JSON among its facts.
"""

import json
from collections.abc import Mapping
from functools import cached_property
from typing import Self

from pydantic import BaseModel, ConfigDict, JsonValue, TypeAdapter, ValidationError

from data.card import DataCard, DataRefusedError
from data.description import Transform
from data.documents import Document
from data.formats import Csv, Format, Table
from data.targets import Target

_FORMAT: TypeAdapter[Format] = TypeAdapter(Format)
_TARGET: TypeAdapter[Target] = TypeAdapter(Target)


class Preparation(BaseModel):
    """What prepares records: no file, checksum or cap of the card. Its fields are the keys of the JSON.

    Attributes:
        name: Of the data set.
        unit: Whom a record is about.
        classes: Names of the classes or labels.
        shape: Of a record that no reader knows the shape of.
        reader: The card's declaration, without the person's column; `format` is the same as a type.
        transform: Of the records that were read.
        words: Of the tokens, in their order; None without tokens.
        encoder: As in params.yaml, with the `sha256` of its weights; None without one.
        target: The card's declaration of another target than classes.

    Example:
        >>> from data.card import data_card
        >>> preparation = Preparation.from_card(data_card("digits"), "none", None)
        >>> preparation.format.kind, preparation.transform
        ('digits', 'none')
        >>> Preparation.of(preparation.document()) == preparation
        True
    """

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    name: str
    unit: str = ""
    classes: tuple[str, ...]
    shape: tuple[int, ...] | None
    reader: dict[str, JsonValue]
    transform: Transform
    words: tuple[str, ...] | None = None
    encoder: dict[str, JsonValue] | None = None
    target: dict[str, JsonValue] | None = None

    @classmethod
    def from_card(
        cls,
        card: DataCard,
        transform: Transform,
        words: bytes | None,
        *,
        encoder: Mapping[str, JsonValue] | None = None,
    ) -> Self:
        """The part of a data card. words: one per line. encoder: with the checksum of its weights."""
        return cls(
            name=card.name,
            unit=card.unit,
            classes=tuple(card.classes),
            shape=card.shape,
            reader=_reader_of(card),
            transform=transform,
            words=None if words is None else tuple(words.decode().splitlines()),
            encoder=None if encoder is None else dict(encoder),
            target=None if card.target is None else card.target.model_dump(mode="json"),
        )

    @classmethod
    def of(cls, document: Mapping[str, JsonValue]) -> Self:
        """What the JSON of a model's file says; raises DataRefusedError for what this version does not know."""
        try:
            return cls.model_validate_json(json.dumps(document))
        except ValidationError:
            raise _unknown() from None

    @cached_property
    def format(self) -> Format:
        """The reader; raises DataRefusedError for one that this version does not know."""
        try:
            return _FORMAT.validate_json(json.dumps(self.reader))
        except ValidationError:
            raise _unknown() from None

    @property
    def reader_kind(self) -> str:
        """The kind of the reader, also of one that this version does not know; empty if none is stated."""
        return str(self.reader.get("kind", ""))

    @property
    def encoder_name(self) -> str:
        """The name of the encoder; empty without one."""
        return str((self.encoder or {}).get("name", ""))

    @property
    def table(self) -> Table | None:
        """The columns of a table whose rows are records as they are; None for other records."""
        return self.format if self.transform == "none" and isinstance(self.format, Table) else None

    def document(self) -> dict[str, JsonValue]:
        """The JSON, without the target of classes."""
        return self.model_dump(mode="json", exclude={"target"} if self.target is None else None)


def preparation_of(document: Mapping[str, JsonValue] | None) -> Preparation | None:
    """How a model's records were prepared; None if the model's file does not say."""
    return None if document is None else Preparation.of(document)


def reader_in(document: Mapping[str, JsonValue] | None) -> Format | None:
    """The reader that prepared a model's records; None if the model's file does not say."""
    return None if document is None else Preparation.of(document).format


def target_in(declared: Mapping[str, JsonValue] | None) -> Target | None:
    """The target that a model's file declares; None for classes."""
    return None if declared is None else _TARGET.validate_json(json.dumps(declared))


def _unknown() -> DataRefusedError:
    return DataRefusedError(
        "the model's file says in a way that this version does not know how records were prepared; use the version that"
        " trained it.",
        code="preparation_unknown",
    )


def _reader_of(card: DataCard) -> dict[str, JsonValue]:
    """The reader without the person's column, which a model does not need and which should not be published.

    In files without a header the column keeps its position, under another name, since positions identify columns.
    """
    reader: Document = json.loads(card.reader.model_dump_json())
    if card.person is not None and isinstance(card.reader, Table):
        is_headerless = isinstance(card.reader, Csv) and not card.reader.header
        placeholder = [{"name": "(person)", "kind": "ignored"}] if is_headerless else []
        index = [column["name"] for column in reader["columns"]].index(card.person.column)
        reader["columns"][index : index + 1] = placeholder
    return reader

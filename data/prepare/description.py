"""What decides on which side a record is, for training or held out, as one value that a population can be held to.

What an algorithm may know about a data set: nothing but what its card declares.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod, sqrt
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, TypeAdapter, ValidationError

from data.prepare.scattering import scattered_shape
from data.schema.card import DataCard, File
from data.schema.errors import DataRefusedError
from data.schema.formats import (
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
from data.schema.targets import Classes, Known, Target


def rule_of(card: DataCard) -> str:
    """SHA-256 in hex of all in a card that can move a record between the training and the held-out side.

    Where the card splits: salt and test fraction, and what an encoded record depends on, such as bounds, categories and
    classes. Elsewhere the checksums of the files that hold test records. It is a function of the card alone: raises
    DataRefusedError where it has `alternatives` with other test files, since which of them is there would decide.
    """
    if card.split is None:
        _check_alternatives(card)
    decides = _of_the_files(card) if card.split is None else _of_the_split(card)
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()


def _of_the_split(card: DataCard) -> dict[str, Any]:
    """A key that a card leaves at its default is left out, here and below, so that later keys change no rule."""
    split = card.split.model_dump(mode="json", exclude_defaults=True) if card.split else None
    if card.person is not None:
        return {"split": split, "person": card.person.column}
    if isinstance(card.reader, Images | ImageTable | Texts):  # whose files as they are decide
        columns = card.reader.content if isinstance(card.reader, Rows) else ()
        return {"split": split, "kind": card.reader.kind, "columns": columns}
    return {
        "split": split,
        "encoding": _encoding(card.reader),
        "classes": card.classes,
        "shape": card.input_shape,
        **({} if card.target is None else {"target": card.target.model_dump(mode="json")}),
    }


def _encoding(reader: Format) -> object:
    if not isinstance(reader, Table):
        return reader.model_dump(
            mode="json", exclude_defaults=True, exclude={"words_sha256", "source_sha256"}
        )  # moves no record
    read = [column for column in reader.columns if not isinstance(column, Ignored)]
    columns = [column.model_dump(mode="json", exclude_defaults=True) for column in read]
    return {"columns": columns, "missing": sorted(set(reader.missing))}


def _of_the_files(card: DataCard) -> dict[str, Any]:
    names_its_part = isinstance(card.reader, Cifar | Digits | Own | Reviews | Synthetic)
    held_out = {"files": _held_out(card.files), "reader": _encoding(card.reader) if names_its_part else None}
    return held_out if card.person is None else held_out | {"person": card.person.column}


def _held_out(files: Mapping[str, File]) -> dict[str, str | None]:
    """The checksums by role; the files of the training records alone are left out, and those that name no record."""
    test = {role: file for role, file in files.items() if role.split("_")[0] not in ("train", "images")}
    return {role: file.sha256 or file.keyed_sha256 or file.md5 for role, file in test.items()}


def _check_alternatives(card: DataCard) -> None:
    if any(_held_out(files) != _held_out(card.files) for files in card.alternatives):
        raise DataRefusedError(
            f"the alternatives of the private data set {card.name!r} have other test files than its files, so that"
            " records trained on could be published as held out; give them the same checksums, or leave them out."
        )


Transform: TypeAlias = Literal["none", "scattering", "encoder"]


@dataclass(frozen=True)
class EncoderFacts:
    """What is public of a frozen encoder: as it was asked for, how many features it makes, of which weights.

    settings: as JSON text. pretrained_on: what its author says, or "unknown". tokens, padding: of a tokenizer, how many
    entries its vocabulary has, and which of them fills up a text.
    """

    name: str
    takes: Literal["images", "texts"]
    width: int
    sha256: str
    pretrained_on: str
    settings: str
    tokens: Annotated[int | None, Field(exclude_if=lambda given: given is None)] = None
    padding: Annotated[int, Field(exclude_if=lambda given: given == 0)] = 0


@dataclass(frozen=True)
class PublicDescription:
    """The public facts of a prepared data set.

    public: whether the records themselves are public. unit: what one record is, the unit of privacy. population:
    whose budget is charged. cap_epsilon, cap_delta: the cap of that budget when it is first seen. records,
    test_records: how many to train and to test on, or None when the number is private. input_shape: of one record's
    features. holdout: whom the test metrics protect; "public" means that the test records are declared public.
    composition, composition_order: how the population's runs add up; see DataCard. blocks_per_person: in how many
    blocks a person may have records. blocks: those that the prepared records are of; none for a population that has
    none. holdout_rule: a digest of what decides which records are held out, for private records; see
    `data.prepare.description`. blocks_by: in words, what divides private records into blocks; None where nothing
    does. feature_norms: the largest L1 and L2 norms that a record's features can have, or None when nothing bounds
    them. tokens: how many there are where features are tokens, int32 from 0, padding and unknown words among them;
    None for real features, float32. words_sha256: checksum of the words that the tokens stand for, in their order,
    where the card declares it; left out where it does not, so that the digest of other descriptions stays. transform:
    what the features were made of each record by, after it was read. encoder: where that is an encoder. target:
    what is predicted, where that is no class. per_person: how many training records can be of one person, None where
    the card names none. pooled: how many rows of a person at most are one training record; see `data.prepare.people`.
    """

    dataset: str
    title: str
    source: str
    licence: str
    public: bool
    unit: str
    population: str
    cap_epsilon: float
    cap_delta: float
    records: int | None
    input_shape: tuple[int, ...]
    classes: tuple[str, ...]
    test_records: int | None
    holdout: Literal["public"]
    feature_norms: tuple[float, float] | None = None
    tokens: int | None = None
    transform: Transform = "none"
    composition: Literal["basic", "zcdp", "renyi"] = "basic"
    composition_order: float | None = None
    blocks_per_person: int = 1
    blocks: tuple[str, ...] = ()
    holdout_rule: str | None = None
    blocks_by: str | None = None
    words_sha256: Annotated[str | None, Field(exclude_if=lambda given: given is None)] = None
    encoder: Annotated[EncoderFacts | None, Field(exclude_if=lambda given: given is None)] = None
    per_person: Annotated[int | None, Field(exclude_if=lambda given: given is None)] = None
    pooled: Annotated[int | None, Field(exclude_if=lambda given: given is None)] = None
    reader_sha256: Annotated[str | None, Field(exclude_if=lambda given: given is None)] = None
    target: Annotated[Target | None, Field(exclude_if=lambda given: given is None)] = None

    @property
    def padding(self) -> int:
        """The token that fills up a text."""
        return 0 if self.encoder is None else self.encoder.padding

    @property
    def known(self) -> Known:
        """What a label can be."""
        return self.target or Classes.model_construct(classes=self.classes)

    @property
    def outputs(self) -> int:
        """How many a model has, at each token where it is asked at each."""
        return self.known.outputs(self.tokens)

    @property
    def label_shape(self) -> tuple[int, ...]:
        """Of one record's labels."""
        return self.known.label_shape(self.input_shape)

    @property
    def rows(self) -> tuple[int, ...]:
        """What comes before these shapes in a training record: its rows where it is a person's, else nothing."""
        return () if self.pooled is None else (self.pooled,)

    def to_json(self) -> str:
        """The description as JSON text; a function of the card, the transform and the names of the blocks alone."""
        return _ADAPTER.dump_json(self, indent=2).decode() + "\n"

    @property
    def digest(self) -> str:
        """SHA-256 of the description; it covers nothing but what is public."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    @staticmethod
    def read(folder: Path) -> "PublicDescription":
        """What is public about the prepared data in a folder; raises DataRefusedError where there are none."""
        try:
            text = (folder / "public.json").read_text(encoding="utf-8")
        except OSError:
            raise DataRefusedError(f"{folder} holds no prepared data; run the prepare stage.") from None
        return PublicDescription.from_json(text)

    @staticmethod
    def from_json(text: str) -> "PublicDescription":
        """The description that `to_json` wrote; raises DataRefusedError when it is none."""
        try:
            return _ADAPTER.validate_json(text)
        except ValidationError:
            raise DataRefusedError(
                "the description of the prepared data is damaged; run the prepare stage again."
            ) from None


_ADAPTER = TypeAdapter(PublicDescription)


def public_description(
    card: DataCard,
    transform: Transform = "none",
    encoder: EncoderFacts | None = None,
) -> PublicDescription:
    """The public facts that `card` declares; raises DataRefusedError for a transform that its records cannot have."""
    is_as_read = transform == "none"
    tokens, is_bounded = encoder.tokens if encoder else card.tokens, not isinstance(card.reader, Own)
    return PublicDescription(
        dataset=card.name,
        title=card.title,
        source=card.source,
        licence=card.licence,
        public=card.public,
        unit=card.unit,
        population=card.population,
        cap_epsilon=card.cap.epsilon,
        cap_delta=card.cap.delta,
        records=card.records.train,
        input_shape=_shape(card, transform, encoder),
        classes=card.classes,
        test_records=card.records.test,
        holdout=card.holdout,
        feature_norms=_feature_norms(card) if is_as_read and tokens is None and is_bounded else None,
        tokens=tokens,
        transform=transform,
        composition=card.composition.kind,
        composition_order=card.composition.order,
        blocks_per_person=card.blocks_per_person * (1 if card.person is None else card.person.group),
        holdout_rule=None if card.public else rule_of(card),
        blocks_by=None if card.public or card.blocks is None else card.blocks.divides_by,
        words_sha256=None if encoder else card.words_sha256,
        encoder=encoder,
        per_person=None if card.person is None else card.person.group,
        pooled=None if card.person is None else card.person.pooled,
        reader_sha256=card.reader.source_sha256 if isinstance(card.reader, Own) else None,
        target=card.target,
    )


def _shape(card: DataCard, transform: Transform, encoder: EncoderFacts | None) -> tuple[int, ...]:
    if card.known.has_tokens and (encoder is None or encoder.tokens is None):
        raise DataRefusedError(
            f"{card.name!r} has the target of {card.known.kind}, which takes the tokens of a public model; name one by"
            " --encoder tokenizer/NAME."
        )
    if transform == "none":
        if not card.input_shape:
            raise DataRefusedError(
                f"the records of {card.name!r} are texts that only an encoder can take; name one by --encoder, or"
                " declare reader.tokens in its card."
            )
        return card.input_shape
    if transform == "scattering":
        return scattered_shape(card)
    if encoder is None:
        raise DataRefusedError(
            "data.transform is encoder, and data.encoder names none; name one, or leave it at none."
        )
    is_text, is_image = card.has_texts, len(card.input_shape) == 3
    if (encoder.takes == "texts") != is_text or not (is_text or is_image):
        kind = "texts" if is_text else "images" if is_image else "tables"
        raise DataRefusedError(
            f"the encoder {encoder.name!r} takes {encoder.takes}, and {card.name!r} has {kind}; name another"
            f" encoder, or"
            " set data.transform to none."
        )
    return (encoder.width,)


def _feature_norms(card: DataCard) -> tuple[float, float]:
    """Largest L1 and L2 norms of a record's features, all of which lie in [0, 1].

    The features of one column of a table add up to at most 1, so that its norms are largest where each column has
    one feature at 1; elsewhere every feature may be 1.
    """
    ones = prod(card.input_shape)
    if isinstance(card.reader, Table):
        ones = sum(column.width > 0 for column in card.reader.columns)
    return float(ones), sqrt(ones)

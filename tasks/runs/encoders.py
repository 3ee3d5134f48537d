"""Load what is named by package.module:factory: the frozen encoder in params.yaml, and the reader in a data card."""

import json
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from algorithms.errors import ModelRefusedError
from algorithms.extension import imported, source_digest
from data import PublicDescription, public_description
from data.card import DataCard, DataRefusedError
from data.description import EncoderFacts
from data.formats import Format, Own
from data.readers.records import Block, OwnReader
from data.targets import Tags, Target
from tasks.config import params

if TYPE_CHECKING:
    from algorithms.encoders import Encoder
    from algorithms.encoders.encoder import Encode


def public_of(card: DataCard, chosen: params.Data) -> PublicDescription:
    """The public description of a card's records as they will be prepared.

    Raises DataRefusedError for a transform that the records cannot have, ModelRefusedError for a missing encoder.
    """
    found = None if chosen.encoder is None else facts_of(chosen.encoder)
    reader_of(card.reader)
    return public_description(card, chosen.transform, found)


def reader_of(reader: Format | None) -> OwnReader | None:
    """The function of the user's own reader; None for a built-in reader.

    Raises NotUsableError if the reader is missing, DataRefusedError if its source is not the declared one.
    """
    if not isinstance(reader, Own):
        return None
    if (found := source_digest(reader.factory)) != reader.source_sha256:
        raise DataRefusedError(
            f"the source of the reader {reader.factory!r} is not the one that source_sha256 declares, so records could"
            f" be read otherwise than they were; restore it, or write {found} into the data card if it is right."
        )
    made: OwnReader = imported(reader.factory, "a reader")(dict(reader.settings))
    return lambda files: _guarded(made, files, reader.factory)


def _guarded(made: OwnReader, files: Mapping[str, Path], factory: str) -> Iterator[Block]:
    """The blocks of the user's own reader, whose errors become a refusal without their messages."""
    try:
        yield from made(files)
    except DataRefusedError:
        raise
    except Exception as error:
        folder = Path(sys.modules[factory.partition(":")[0]].__file__ or "").parent
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if folder in Path(frame.filename).parents]
        where = f" in line {own[-1].lineno} of {Path(own[-1].filename).name}" if own else ""
        raise DataRefusedError(
            f"the reader {factory!r} raised {type(error).__name__}{where}; its message is not shown, as it may hold a"
            " value of a record: try the reader on made-up files."
        ) from None


def encoder_of(chosen: params.Encoder) -> "Encoder":
    """The named encoder, without its weights; raises ModelRefusedError if it is not available."""
    from algorithms.encoders import Frozen, encoder  # here, since torch takes seconds to import

    try:
        settings = Frozen.model_validate(chosen.settings)
    except ValidationError as error:
        problem = params.in_words(error.errors()[0], "data.encoder.settings")
        raise ModelRefusedError(f"params.yaml: {problem}; correct it.") from None
    return encoder(chosen.name, settings, checkpoint=chosen.checkpoint)


def loader_of(chosen: params.Encoder, target: Target | None) -> Callable[[], "Encode"]:
    """The function that loads the named encoder's weights. If words are tagged, it must be a tokenizer.

    Raises ModelRefusedError for another encoder.
    """
    found = encoder_of(chosen)
    load = found.aligned if isinstance(target, Tags) else found.load
    if load is None:
        raise ModelRefusedError(f"{chosen.name!r} does not say which tokens a word has; name tokenizer/NAME.")
    return load


def carried_in(preparation: Mapping[str, Any] | None) -> params.Encoder | None:
    """The encoder whose output a model was trained on, if any.

    Raises ModelRefusedError if it is not available, or has other weights.
    """
    carried = dict((preparation or {}).get("encoder") or {})
    if not carried:
        return None
    expected = carried.pop("sha256")
    chosen = params.Encoder.model_validate(carried)
    if encoder_of(chosen).sha256 != expected:
        raise ModelRefusedError(
            f"the encoder {chosen.name!r} here has other weights than the one that the model was trained behind, whose"
            f" checksum is {expected}; install that one."
        )
    return chosen


def facts_of(chosen: params.Encoder) -> EncoderFacts:
    """The public facts of the named encoder."""
    found = encoder_of(chosen)
    settings = json.dumps(chosen.settings, sort_keys=True)
    return EncoderFacts(
        found.name,
        found.takes,
        found.width,
        found.sha256,
        found.pretrained_on,
        settings,
        found.tokens,
        found.padding,
    )

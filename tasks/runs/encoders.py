"""The frozen encoder that params.yaml names: its public facts, and its function."""

import json
from typing import TYPE_CHECKING

from pydantic import ValidationError

from algorithms.errors import EncoderRefusedError
from data import PublicDescription, public_description
from data.prepare.description import EncoderFacts
from data.schema.card import DataCard
from tasks.config import params

if TYPE_CHECKING:
    from algorithms.encoders import Encoder


def public_of(card: DataCard, chosen: params.Data) -> PublicDescription:
    """What is public about the records of a card as they will be prepared.

    Raises DataRefusedError for a transform that the records cannot have, EncoderRefusedError for an encoder that is not
    here.
    """
    found = None if chosen.encoder is None else facts_of(chosen.encoder)
    return public_description(card, chosen.transform, found)


def encoder_of(chosen: params.Encoder) -> "Encoder":
    """The encoder that is named, without its weights; raises EncoderRefusedError where it cannot be had."""
    from algorithms.encoders import Frozen, encoder  # here, since torch takes seconds to import

    try:
        settings = Frozen.model_validate(chosen.settings)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, ("data.encoder.settings", *first["loc"])))
        raise EncoderRefusedError(f"params.yaml: {where}: {first['msg']}; correct it.") from None
    return encoder(chosen.name, settings, checkpoint=chosen.checkpoint)


def facts_of(chosen: params.Encoder) -> EncoderFacts:
    """What is public of the encoder that is named."""
    found = encoder_of(chosen)
    settings = json.dumps(chosen.settings, sort_keys=True)
    return EncoderFacts(found.name, found.takes, found.width, found.sha256, found.pretrained_on, settings)

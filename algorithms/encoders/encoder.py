"""An encoder: public facts, and a function from records to features."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from algorithms.errors import ModelRefusedError
from algorithms.models.libraries import public_folder

UNKNOWN_ORIGIN = "unknown"


class EncoderSettings(BaseModel):
    """Settings of an encoder.

    size: side in pixels of the square to which images are resized; by default the encoder's own. mirror: whether to
    average the features of an image and its mirror image. length: the largest number of tokens of a text; longer texts
    are truncated. layer: the transformer layer whose states are averaged; by default the last.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    size: int | None = Field(default=None, ge=8, le=2048)
    mirror: bool = False
    length: int = Field(default=256, ge=1, le=8192)
    layer: int | None = Field(default=None, ge=1)


@dataclass(frozen=True)
class Encoder:
    """A frozen public network, or a public tokenizer.

    Attributes:
        name: As requested.
        takes: Images as float32 [n, channels, height, width] in [0, 1], or texts as strings.
        width: Number of features per record.
        sha256: Checksum of the weights file. Of an encoder of your own, what your factory states; `encoder` replaces it
            by a digest of that, of your code and of `weights`.
        pretrained_on: According to its author, or "unknown".
        tokens: For a tokenizer, the size of its vocabulary; its "features" are tokens, int32 [n, width].
        padding: The token that pads a text.
        aligned: For a tokenizer, the encoder of texts whose words are separated by the unit separator. It returns int32
            [n, 2, width]: the tokens, and the word's position at the first token of each word, otherwise -1.
        weights: Of an encoder of your own, the file of its weights, if it has one.
        write: For a tokenizer, writes its files into a folder in its library's format; for texts, or for their words.
        load: Reads the weights and returns a function from n records to their features, float32 [n, width]. A record's
            features do not depend on the other records. The function may be called from several threads.
    """

    name: str
    takes: Literal["images", "texts"]
    width: int
    sha256: str
    pretrained_on: str
    load: Callable[[], "Encode"]
    tokens: int | None = None
    padding: int = 0
    aligned: Callable[[], "Encode"] | None = None
    write: Callable[[Path, bool], None] | None = None
    weights: Path | None = None


Records = NDArray[np.float32] | Sequence[str]
Encode = Callable[[Records], NDArray[np.float32] | NDArray[np.int32]]


@contextmanager
def folder_of(name: str) -> Iterator[Path]:
    """The folder of a public model, within the block; raises ModelRefusedError if it is missing or has no model."""
    try:
        with public_folder(name) as folder:
            yield folder
    except ModelRefusedError:
        raise
    except (OSError, ValueError) as error:
        why = str(error).partition("\n")[0]
        raise ModelRefusedError(
            f"{name!r} cannot be read as a public model ({why}); give the folder of one."
        ) from None

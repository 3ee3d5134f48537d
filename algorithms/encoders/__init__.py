"""Public pretrained encoders: frozen networks that map each record to features, on which models are trained.

May import `algorithms.models.libraries` and `algorithms.extension`, but nothing of privacy. The people in an encoder's
pretraining data are not protected.
"""

from algorithms.encoders.encoder import Encoder, Frozen
from algorithms.encoders.registry import SHIPPED, encoder
from algorithms.errors import EncoderRefusedError

__all__ = ["SHIPPED", "Encoder", "EncoderRefusedError", "Frozen", "encoder"]

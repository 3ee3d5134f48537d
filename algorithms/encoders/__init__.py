"""Public pretrained encoders: frozen networks that look at each record by itself, in place of which their features are
trained on. May import `algorithms.models.libraries` and `algorithms.extension`, and nothing of privacy.

What they were pretrained on was public, or others' to publish; the people in it are not protected by a run here.
"""

from algorithms.encoders.encoder import Encoder, Frozen
from algorithms.encoders.registry import SHIPPED, encoder
from algorithms.errors import EncoderRefusedError

__all__ = ["SHIPPED", "Encoder", "EncoderRefusedError", "Frozen", "encoder"]

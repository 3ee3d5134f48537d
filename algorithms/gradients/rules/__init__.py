"""What each operation's gradients are made of."""

from algorithms.gradients.rules.catalogue import RULES
from algorithms.gradients.rules.general import general

__all__ = ["RULES", "general"]

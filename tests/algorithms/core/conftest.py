"""Equal models are inspected, and equal runs are priced, once."""

from tests.support.costs import costs_once
from tests.support.engines import engines_once

__all__ = ["costs_once", "engines_once"]

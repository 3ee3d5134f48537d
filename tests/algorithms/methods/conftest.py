"""Methods train few models, the same from test to test, so that each is inspected, and equal runs are priced, once."""

from tests.support.costs import costs_once
from tests.support.engines import engines_once

__all__ = ["costs_once", "engines_once"]

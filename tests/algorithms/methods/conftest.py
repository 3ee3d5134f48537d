"""Methods train few models, the same from test to test, so that each is inspected once."""

from tests.support.engines import engines_once

__all__ = ["engines_once"]

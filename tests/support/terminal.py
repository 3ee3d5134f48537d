"""A terminal at which a person gives one answer."""

import io

from tests.support.visits import visits as visits


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

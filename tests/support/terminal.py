"""A terminal at which a person gives one answer."""

import io


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

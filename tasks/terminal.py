"""What is shown at a terminal: names, file names and lines of other programs cannot format it or move its cursor."""

from typing import Any

from rich.console import Console
from rich.text import Text

from algorithms.plain_text import for_terminal


class PlainConsole(Console):
    """A console that shows texts as they are, without markup, emoji or escape sequences in them."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(markup=False, emoji=False, **settings)

    def render_str(self, text: str, **settings: Any) -> Text:
        """Make what is printed of a text, or of a cell of a table."""
        return super().render_str(for_terminal(text), **settings)

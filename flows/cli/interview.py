"""Questions at a terminal: an answer that cannot be is asked again, `<` goes back to the question before."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import typer

from algorithms.plain_text import for_terminal
from flows.cli.running import say

T = TypeVar("T")
BACK = "<"


class _BackError(Exception):
    """The question before is wanted again."""


@dataclass
class Interview:
    """Asks questions, and remembers the answers, so that going back repeats none of them."""

    _answers: list[str] = field(default_factory=list)
    _next: int = 0

    def ask(self, question: str, parse: Callable[[str], T], default: str | None = None) -> T:
        """Ask until the answer can be parsed; `parse` raises ValueError with the reason if it cannot."""
        if self._next < len(self._answers):
            self._next += 1
            return parse(self._answers[self._next - 1])
        while True:
            answer = str(typer.prompt(for_terminal(question), default=default, show_default=bool(default)))
            if answer.strip() == BACK:
                raise _BackError
            try:
                found = parse(answer)
            except ValueError as error:
                say(f"  {error}")
                continue
            self._answers.append(answer)
            self._next += 1
            return found

    def hold(self, questions: Callable[["Interview"], T]) -> T:
        """The result of `questions`, which are asked from the start, with the answers so far.

        If they go back, or raise ValueError as the answers do not fit together, the last answer is asked again.
        """
        while True:
            self._next = 0
            try:
                return questions(self)
            except _BackError:
                pass
            except ValueError as error:
                if not self._answers:
                    raise
                say(f"  {error}")
            del self._answers[-1:]

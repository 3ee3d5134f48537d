"""Questions at a terminal: an answer that cannot be is asked again, `<` goes back to the question before."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
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

    _answers: list[tuple[str, str]] = field(default_factory=list)
    """Questions with their answers."""
    _next: int = 0

    @contextmanager
    def keep_answers(self, file: Path) -> Iterator[None]:
        """Go on from the answers in a file; store them there if the block ends early, as by Ctrl-D; else delete it."""
        with suppress(OSError, ValueError):
            self._answers = [
                (str(question), str(answer)) for question, answer in json.loads(file.read_text("utf-8"))
            ]
            say(f"The first answers are those in {file}; delete it to begin anew.")
        try:
            yield
        except BaseException:
            if self._answers:
                file.write_text(json.dumps(self._answers), "utf-8")
                say(f"\nThe answers are kept in {file}; the same command goes on from there.", error=True)
            raise
        file.unlink(missing_ok=True)

    def ask(self, question: str, parse: Callable[[str], T], default: str | None = None) -> T:
        """Ask until the answer can be parsed; `parse` raises ValueError with the reason if it cannot."""
        if self._next < len(self._answers):
            saved_question, answer = self._answers[self._next]
            if saved_question == question:
                self._next += 1
                return parse(answer)
            del self._answers[self._next :]  # they belong to other options or another file
        while True:
            answer = str(typer.prompt(for_terminal(question), default=default, show_default=bool(default)))
            if answer.strip() == BACK:
                raise _BackError
            try:
                value = parse(answer)
            except ValueError as error:
                say(f"  {error}")
                continue
            self._answers.append((question, answer))
            self._next += 1
            return value

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
                if not self._next:  # no answer is the reason
                    raise
                say(f"  {error}")
            del self._answers[max(self._next - 1, 0) :]

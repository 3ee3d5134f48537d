"""Output of the commands: sentences, tables and JSON; a refusal is one sentence and exit status 2."""

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console, RenderableType

SETTINGS: dict[str, Any] = {
    "no_args_is_help": True,
    "add_completion": False,
    "pretty_exceptions_enable": False,
}
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)


def say(text: str, *, error: bool = False) -> None:
    """Print a line to stdout or stderr."""
    typer.echo(text, err=error)


def show(content: RenderableType) -> None:
    """Print a table to stdout."""
    with sentences():
        Console().print(content)


def show_json(document: object) -> None:
    """Print a document to stdout as JSON."""
    with sentences():
        typer.echo(json.dumps(document, indent=2))


@contextmanager
def sentences() -> Iterator[None]:
    """Turn a refusal in the block, a denied permission or a full disk into one sentence on stderr and exit status 2."""
    try:
        yield
    except Exception as error:
        from tasks.runs.stages import disk_full, refusals

        if isinstance(error, refusals()):
            words: str | None = str(error)
        elif isinstance(error, OSError) and error.errno in _DENIED:
            why = os.strerror(error.errno).lower()
            words = f"{error.filename or 'a file'}: {why}; use another place, or change its permissions."
        else:
            words = disk_full(error)
        if words is None:
            raise
        say(f"refused: {' '.join(words.split())}", error=True)
        raise typer.Exit(2) from None

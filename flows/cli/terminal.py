"""Output of the commands: sentences, tables and JSON; a refusal is one sentence and exit status 2."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console, RenderableType

SETTINGS: dict[str, Any] = {
    "no_args_is_help": True,
    "add_completion": False,
    "pretty_exceptions_enable": False,
}


def say(text: str, *, error: bool = False) -> None:
    """Print a line to stdout or stderr."""
    typer.echo(text, err=error)


def show(content: RenderableType) -> None:
    """Print a table to stdout."""
    Console().print(content)


def show_json(document: object) -> None:
    """Print a document to stdout as JSON."""
    typer.echo(json.dumps(document, indent=2))


def run_by_itself(command: Callable[..., None]) -> None:
    """Run a command as a program of its own, such as `python -m flows.pipeline`."""
    alone = typer.Typer(**SETTINGS)
    alone.command()(command)
    alone()


@contextmanager
def sentences() -> Iterator[None]:
    """Turn a refusal in the block, or a denied permission, into one sentence on stderr and exit status 2."""
    try:
        yield
    except PermissionError as error:
        place = error.filename or "a file"
        say(f"refused: {place}: permission denied; use another place, or change its permissions.", error=True)
        raise typer.Exit(2) from None
    except ValueError as error:
        from tasks.runs.stages import refusals

        if not isinstance(error, refusals()):
            raise
        say(f"refused: {' '.join(str(error).split())}", error=True)
        raise typer.Exit(2) from None

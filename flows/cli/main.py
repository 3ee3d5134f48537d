"""The command `epsilonflow`; it works in the checkout that the current folder is or lies in.

Each command imports what it needs when it runs, so that `--help` is quick.
"""

from pathlib import Path
from typing import Annotated

import typer

from flows.cli import ledger, server
from flows.cli.models import card_app, export, predict, release, report
from flows.cli.projects import data_app, doctor, init
from flows.cli.running import SETTINGS, OneSentence, say
from flows.cli.runs import advise, audit, compare, plan, retrain, run, track, tune
from tasks.runs.checkout import append_checkout_to_path, find_checkout

app = typer.Typer(
    cls=OneSentence,
    **{**SETTINGS, "add_completion": True},
    help="Train models with differential privacy, and prove what it cost.",
)
_GROUPS = {
    "Set up": (init, doctor),
    "Plan and run": (plan, advise, run, retrain, tune, compare, track),
    "Use the model": (predict, export, release, report),
    "Check and budget": (audit,),
}
_SUBCOMMANDS = {
    "Set up": {"data": data_app, "server": server.app},
    "Check and budget": {"card": card_app, "ledger": ledger.app},
}
for title, commands in _GROUPS.items():
    for command in commands:
        app.command(rich_help_panel=title)(command)
for title, apps in _SUBCOMMANDS.items():
    for name, further in apps.items():
        app.add_typer(further, name=name, rich_help_panel=title)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        say(f"epsilonflow {version('epsilonflow')}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train models with differential privacy, and prove what it cost."""
    append_checkout_to_path(find_checkout() or Path.cwd())


if __name__ == "__main__":
    app()

"""Commands for a Prefect server on this machine, what is deployed there, and who is told of its runs."""

from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer

from flows.cli.running import SETTINGS, has_prefect_api, prefect_api_url, say
from tasks.runs.checkout import find_checkout

app = typer.Typer(**SETTINGS, help="A Prefect server for schedules: start it, deploy the flows, stop it.")
DEFAULT_PORT = 4200


def _url() -> str:
    """The API of the server that the environment names, or of the one that `start` starts."""
    return prefect_api_url() or f"http://127.0.0.1:{DEFAULT_PORT}/api"


@app.command()
def start(
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port on this machine.")] = DEFAULT_PORT,
) -> None:
    """Start a Prefect server in the background, and wait until it answers."""
    from flows.server import start_server

    url = start_server(port)
    say(f"A Prefect server answers. For commands to use it:  export PREFECT_API_URL={url}")


@app.command()
def deploy(
    file: Annotated[Path, typer.Option(help="The deployments.")] = Path("prefect.yaml"),
    notify: Annotated[
        str | None,
        typer.Option(
            help="Who is told of runs that fail, are refused, late or stuck: a notification block of Prefect such as"
            ' slack-webhook/oncall, or a URL that gets {"text": ...}.',
            show_default="as before; nobody at first",
        ),
    ] = None,
    stuck_after: Annotated[
        float, typer.Option(min=5, help="Minutes without a sign of life after which a run is stuck, or late.")
    ] = 10.0,
) -> None:
    """Deploy the flows to the server, and install automations that look after stuck runs and tell a person."""
    from flows.prefect_api import answers_at, no_server_at
    from tasks.config.params import ParamsRefusedError

    root = find_checkout() or Path.cwd()
    url = _url()
    # A server that is configured and answers oddly is left to `OneSentence`.
    if not has_prefect_api() and not answers_at(url):
        raise ParamsRefusedError("{problem}", code="no_server", problem=no_server_at(url), url=url)
    from prefect.settings import PREFECT_API_URL, temporary_settings

    from flows import server

    with temporary_settings({PREFECT_API_URL: url}):
        with server.keep_schedules():
            server.deploy(root / file, root, url)
        for name in server.install_automations(timedelta(minutes=stuck_after), notify):
            say(name.replace("epsilonflow:", "automation:"))
    say("The flows are deployed. Start a worker:  prefect worker start --pool local-pool")


@app.command()
def status() -> None:
    """Say whether a Prefect server answers, and whether a worker takes runs; exit status 2 where one is missing."""
    from flows.prefect_api import answers_at, no_server_at
    from tasks.config.params import ParamsRefusedError

    url = _url()
    if not answers_at(url):
        raise ParamsRefusedError("{problem}", code="no_server", problem=no_server_at(url), url=url)
    from prefect.settings import PREFECT_API_URL, temporary_settings

    from flows.server import POOL, count_workers

    with temporary_settings({PREFECT_API_URL: url}):
        workers = count_workers()
    say(f"A Prefect server answers at {url}.")
    if not workers:
        raise ParamsRefusedError(
            "no worker takes runs there; deploy the flows by `epsilonflow server deploy` if that was never done, then"
            " start a worker:  prefect worker start --pool {pool}",
            code="no_worker",
            pool=POOL,
        )
    say(f"Workers that take runs: {workers}.")


@app.command()
def stop() -> None:
    """Stop the Prefect server that was started in the background, and wait until it has ended."""
    from flows.prefect_api import answers_at
    from flows.server import stop_server

    url = _url()
    say("The Prefect server has ended." if stop_server() else "No Prefect server runs in the background.")
    if answers_at(url):
        say(f"Another one still answers at {url}, which another user or command has started; end it there.")

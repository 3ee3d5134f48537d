"""The command `epsilonflow`: what it says, what it refuses, and that it spends nothing unasked."""

import inspect
import io
import json
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import typer
from filelock import FileLock, Timeout
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from rich.console import Console
from typer.main import get_command
from typer.testing import CliRunner, Result

from algorithms.privacy.accounting import Budget
from algorithms.privacy.card import PrivacyCard, load, public_key_of
from flows.cli import server as server_commands
from flows.cli.main import app
from flows.cli.running import OneSentence, StageOutput, has_prefect_api
from tasks.config.params import ParamsRefusedError
from tasks.runs.signing import signing_key
from tests.support.cards import card, category, csv_of, label, number
from tests.support.checkout import PROJECT, Checkout
from tests.support.one_process import stay_in_this_process
from tests.support.refusals import refused_as


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})


@pytest.fixture
def here(checkout: Checkout, monkeypatch: pytest.MonkeyPatch) -> Checkout:
    monkeypatch.chdir(checkout.root)
    return checkout


def assert_refused(result: Result, words: str) -> None:
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("refused: ")
    assert result.stderr.count("\n") == 1
    assert words in result.stderr


def _options(app: Any) -> list[Any]:
    inner = getattr(app, "commands", {}).values()
    return [*app.params, *(found for command in inner for found in _options(command))]


def test_help_is_plain_text_and_says_defaults_that_are_worked_out() -> None:
    marked = [text for one in _options(get_command(app)) if "[" in (text := getattr(one, "help", None) or "")]
    assert marked == []  # rich takes words in brackets for a style, and leaves them out
    assert "one person" in call("init", "--help").stdout


OF_A_CARD = {"torch", "prefect", "dvc", "matplotlib", "wandb", "pandas", "sqlalchemy", "sklearn"}
OF_A_RUN = OF_A_CARD - {"sqlalchemy"}


@pytest.mark.parametrize(
    "unneeded",
    [
        {
            "--help": {"numpy", "pydantic", "ruamel.yaml", "torch", "rich.progress", "importlib.metadata"},
            **dict.fromkeys(("run --help", "card verify", "card show"), OF_A_CARD),
        },
        {
            "ledger show": {"torch", "prefect", "pandas", "dp_accounting.dp_event", "scipy", "wandb"},
            "run": OF_A_RUN | {"scipy", "dp_accounting.dp_event", "pyarrow", "PIL"},  # which is done
            "plan": OF_A_RUN
            | {"scipy.stats", "scipy.signal", "dp_accounting.pld", "pyarrow", "PIL", "numpy.f2py"},
        },
    ],
)
def test_a_command_imports_no_more_than_it_needs(checkout: Checkout, unneeded: dict[str, set[str]]) -> None:
    """Which is what its time goes into. Commands that share a process need no more from one to the next."""
    code = f"""import sys; from flows.cli.main import app
for command, names in {unneeded!r}.items():
    try: app(command.split())
    except SystemExit: pass
    print(command, names & set(sys.modules), file=sys.stderr)"""
    done = checkout.run(sys.executable, "-c", code)
    assert done.returncode == 0 and done.stdout, done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith(tuple(unneeded))]
    assert said == [f"{command} set()" for command in unneeded]


def test_a_run_that_is_done_is_not_done_again(here: Checkout, monkeypatch: pytest.MonkeyPatch) -> None:
    stay_in_this_process(monkeypatch)
    head, files = here.ledger.head(), sorted(here.root.glob("artifacts/**/*"))
    for arguments in ((), ("--epsilon", "3"), ("--set", "algorithm.steps=5")):
        result = call("run", *arguments)
        assert result.exit_code == 0, result.output
        assert result.stdout.startswith("existing result, nothing charged:\n")
        assert "training" not in result.output
        assert "artifacts/report.html" in result.stdout
    assert here.ledger.head() == head
    assert sorted(here.root.glob("artifacts/**/*")) == files
    assert (here.home / "ledger.sqlite").exists()


@pytest.mark.parametrize("command", ["run", "plan"])
def test_what_cannot_be_is_refused_before_any_stage_starts_and_nothing_changes(
    here: Checkout, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    here.ledger.set_cap("digits", Budget(4.0, 1e-3))
    head, params = here.ledger.head(), (here.root / "params.yaml").read_text()
    monkeypatch.setattr("tasks.runs.dvc_stages.reproduce", None)
    for arguments, words in (
        ("--dataset nist", "no data set 'nist'"),
        ("--delta 1", "privacy.delta"),
        ("--set privacy.epsilom=1", "unknown key privacy.epsilom"),
        ("--set privacy.epsilon", "key=value"),
        ("--delta 0.01", "at most"),
        ("--delta 0", "set privacy.delta or privacy.accountant"),
        ("--set algorithm.expected_batch_size=100000", "algorithm.expected_batch_size"),
        ("--set model.name=logistic", "2 classes"),
        ("--set privacy.epsilon=1e9", "privacy.epsilon"),
        ("--set privacy.count_noise=1e300", "privacy.count_noise"),
        ("--set algorithm.steps=1000000000", "algorithm.steps"),
        ("--set ledger.url=foo", "is no URL"),
        ("--set data.blocks=[a]", "blocks"),
        ("--set performance.device=cuda", "no such device"),
        ("--epsilon 5", "left of its cap"),
    ):
        result = call(command, *arguments.split())
        assert result.exit_code == 2, result.output
        said = [line for line in result.stderr.splitlines() if line.startswith("refused: ")]
        assert [words in line for line in said] == [True], arguments
        assert here.ledger.head() == head
        assert (here.root / "params.yaml").read_text() == params


def test_a_plan_says_the_cost_and_spends_nothing(here: Checkout) -> None:
    here.ledger.set_cap("digits", Budget(6.0, 1e-3))
    head, params = here.ledger.head(), (here.root / "params.yaml").read_text()
    result = call("plan", "--epsilon", "1")
    assert result.exit_code == 0, result.output
    rows = {cells[0]: cells[1] for cells in _cells(result.stdout)}
    cost = float(rows["epsilon"].split(" by PLD")[0])
    assert 0.99 < cost <= 1.0
    assert rows["steps"] == "5"
    assert rows["runs like this that fit"] == "3"
    assert rows["cap"].startswith("epsilon 6, delta 0.001; the one in the data card is no longer used")
    assert here.ledger.head() == head
    assert (here.root / "params.yaml").read_text() == params


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ((), "as long as the noise of a step lets it be"),
        (("--encoder", "efficientnet-lite0"), "would move an output by more than"),
    ],
)
def test_advice_gives_reasons_for_what_a_plan_with_the_same_options_runs(
    here: Checkout, options: tuple[str, ...], reason: str
) -> None:
    written = (here.root / "params.yaml").read_text()
    advice = call("advise", "--dataset", "fashion-mnist", "--epsilon", "1", *options)
    assert advice.exit_code == 0, advice.output
    assert reason in " ".join(advice.stdout.split())
    if options:  # without an encoder, advice is by numbers alone, and a plan by the data set's recipe
        planned = call("plan", "--dataset", "fashion-mnist", "--epsilon", "1", *options)
        noises = [line for line in planned.stdout.splitlines() if "noise multiplier" in line]
        assert noises and set(noises) <= set(advice.stdout.splitlines())
    assert (here.root / "params.yaml").read_text() == written


def test_a_plan_says_what_the_attack_that_is_its_target_achieves(here: Checkout) -> None:
    target = ("privacy.target={false_alarms: 0.01, caught: 0.05}", "privacy.epsilon=null")
    result = call("plan", "--algorithm", "dp_gd", *(word for one in target for word in ("--set", one)))
    assert result.exit_code == 0, result.output
    said = {cells[0]: cells[1] for cells in _cells(result.stdout)}["an attacker"]
    found = float(said.removeprefix("recognises at most ").split("%")[0])
    assert 4.5 < found <= 5.0
    assert said.endswith("5.00% is allowed")


def test_a_plan_gives_no_number_for_noise_that_is_chosen_adaptively(here: Checkout) -> None:
    for algorithm, words in (
        ("dpis", r"at most \d+\.?\d*, chosen by epoch"),
        ("dp_agd", "chosen adaptively"),
    ):
        result = call("plan", "--algorithm", algorithm, "--epsilon", "1")
        assert result.exit_code == 0, result.output
        assert re.search(rf"noise multiplier *│ *{words}", result.stdout)


def test_of_two_settings_for_one_thing_the_one_asked_for_counts_and_both_are_refused(here: Checkout) -> None:
    little = ("plan", "--dataset", "digits", "--algorithm", "dpis", "--set", "algorithm.norm_noise=0.00001")
    assert_refused(call(*little), "raise algorithm.norm_noise or")
    both = ("--set", "algorithm.norm_noise_multiplier=100")
    assert_refused(call(*little, *both), "norm_noise and norm_noise_multiplier were both given")


def test_a_plan_for_a_population_without_runs_says_its_cap(here: Checkout) -> None:
    result = call("plan", "--dataset", "adult", "--epsilon", "1")
    assert result.exit_code == 0, result.output
    cells = [line.split("│")[1:3] for line in result.stdout.splitlines() if "│" in line]
    rows = [[cell.strip() for cell in row] for row in cells[-2:]]
    assert rows == [
        ["spent", "nothing so far"],
        ["runs add up by", "basic composition: epsilons and deltas add up"],
    ]
    assert "adult" not in here.ledger.populations()


def test_a_plan_looks_at_the_file(here: Checkout) -> None:
    card = (PROJECT / "examples/own_data/visits.yaml").read_text()
    (here.root / "data/cards/visits.yaml").write_text(card)
    asked = ("plan", "--dataset", "visits", "--epsilon", "1")
    assert "there is no file" in call(*asked).stderr
    shutil.copytree(PROJECT / "examples/own_data", here.root / "examples/own_data")
    assert call(*asked).exit_code == 0
    too_much = call("plan", "--dataset", "visits", "--epsilon", "20", "--delta", "1e-5")
    assert too_much.exit_code == 2 and "let the owner raise `cap` in the data card" in too_much.stderr
    with (here.root / "examples/own_data/visits.csv").open("a") as file:
        file.write("30,2,none,pain,no\n")
    assert_refused(call(*asked), "is truncated or altered")


def test_without_a_server_a_run_needs_no_prefect(
    finished_once: Checkout,
) -> None:
    assert not has_prefect_api()
    said, told = ((finished_once.root.parent / name).read_text() for name in ("stdout", "stderr"))
    assert told.splitlines()[1:3] == ["preparing the data ...", "calibrating the noise ..."]
    assert told.count("step 5 of 5") == 1
    assert not [word for word in ("Running stage", "lock file", "Prefect", "prefect") if word in told]
    assert said.count("test accuracy") == 1 and "│ artifacts/report.html" in said


def test_a_server_is_that_of_the_profile_and_not_waited_for_where_it_is_away(
    own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_HOME", str(own_home))
    (own_home / "profiles.toml").write_text(
        'active = "own"\n[profiles.own]\nPREFECT_API_URL = "http://127.0.0.1:9/api"\n'
    )
    with refused_as("no_server", ParamsRefusedError, url="http://127.0.0.1:9/api"):
        has_prefect_api()
    with answering(503, b"{}") as url:  # as a busy one does
        monkeypatch.setenv("PREFECT_API_URL", f"{url}/api")
        assert has_prefect_api()


@pytest.mark.parametrize(
    ("line", "is_reused"),
    [("training ...", False), ("existing result, nothing charged: run 5f0c-1 is the same.", True)],
)
def test_the_train_stage_says_itself_whether_it_trains(line: str, is_reused: bool) -> None:
    written = io.StringIO()
    steps = StageOutput(console=Console(file=written, width=120))
    steps.begin("train")
    steps.line("Running stage 'train':")
    assert written.getvalue() == ""
    steps.line(line)
    assert (written.getvalue(), steps.is_reused) == (f"{line}\n", is_reused)


def test_of_a_refused_stage_its_sentence_alone_is_shown_once() -> None:
    written = io.StringIO()
    steps = StageOutput(console=Console(file=written))
    steps.begin("calibrate")
    for line in (
        "Running stage 'train':",
        "> python -m tasks.train",
        "refused: the run costs too much.",
        "failed to reproduce 'train': failed to run: python -m tasks.train, exited with 2",
        "ERROR: failed to reproduce 'train'",
    ):
        steps.line(line)
    assert written.getvalue() == "calibrating the noise ...\n"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("step 30 of 300, 124.9 steps/s, 2 s left, epsilon so far 0.3", "steps"),
        ("encoded 30 of 300 records, 9 s left", "encoded records"),
    ],
)
def test_what_takes_long_is_one_bar_at_a_terminal_and_lines_elsewhere(line: str, words: str) -> None:
    for is_terminal in (True, False):
        written = io.StringIO()
        steps = StageOutput(console=Console(file=written, force_terminal=is_terminal, width=120))
        steps.begin("prepare")
        for _ in range(3):
            steps.line(line)
        assert (steps._bar is not None) == is_terminal
        if steps._bar is not None:
            (task,) = steps._bar.tasks
            assert (task.completed, task.total, task.description) == (30, 300, line.split(", ", 1)[1])
            steps.end()
            assert f"  {words} " in written.getvalue()
        assert written.getvalue().count(line) == (0 if is_terminal else 3)


def test_audits_and_searches_are_refused_once_and_before_prefect(
    here: Checkout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "prefect", None)
    (here.root / "odd.yaml").write_text(
        "{epsilon: 4.0, space: {algorithm.clip_norm: {low: 2, high: 1, points: 3}}}"
    )
    for arguments, words in (
        ("audit --method magic", "no algorithm 'magic'"),
        ("audit --method non_private", "claims no privacy"),
        ("audit --set nothing=1", "unknown key algorithm.nothing"),
        ("tune", "write one, such as {space: "),
        ("tune params.yaml", "params.yaml: space is missing; correct it"),
        ("tune --plan odd.yaml", "odd.yaml: space.algorithm.clip_norm.range: a range needs low < high, and"),
    ):
        assert_refused(call(*arguments.split()), words)


def test_audits_and_searches_need_no_prefect(here: Checkout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prefect", None)
    monkeypatch.setattr("tasks.auditing.audit_mechanisms", lambda **_: [])  # of the mechanisms alone
    few = ("--runs", "8", "--canaries", "8", "--workers", "1")
    audited = call("audit", "--method", "majority", *few)
    assert audited.exit_code == 0, audited.output
    assert re.match(r"majority: claimed (4|3\.99\d*), found ", audited.stdout)  # as near as noise is searched
    assert audited.stderr == "auditing majority on 1 cores ...\n"
    (here.root / "tune.yaml").write_text(
        "epsilon: 4.0\nspace: {algorithm.update.learning_rate: [0.5, 2.0]}\ntrials: {mean: 2}\n"
    )
    is_free = list[bool]()

    def is_lock_free(folder: Path, *_: object, root: Path) -> bool:
        with suppress(Timeout), FileLock(root / ".dvc/tmp/epsilonflow.lock").acquire(blocking=False):
            is_free.append(True)
        return True

    monkeypatch.setattr("tasks.tuning.search.log_winner", is_lock_free)
    found = call("tune")
    assert found.exit_code == 0, found.output
    assert not is_free, "another search could replace the winner before it is logged"
    assert re.match(r"the winner of search \w+-1 is in tuned; all of it cost epsilon 3\.9", found.stdout)
    assert found.stderr == "searching: at most epsilon 4 for all trials together ...\n"
    assert call("card", "verify", "tuned/privacy_card.json").exit_code == 0
    assert "nothing charged" not in found.stdout
    assert "; existing result, nothing charged." in call("tune").stdout


def test_the_price_of_a_search_is_held_against_the_ledger(here: Checkout) -> None:
    (here.root / "tune.yaml").write_text(
        "{epsilon: 4.0, space: {algorithm.steps: {low: 2, high: 4, points: 2, scale: linear}}}"
    )
    assert call("tune", "--plan").exit_code == 0
    here.ledger.set_cap("digits", Budget(3.5, 1e-3))
    assert_refused(call("tune", "--plan"), "this costs epsilon 3.9")


def test_the_version_is_said_and_a_shell_completes() -> None:
    assert re.fullmatch(r"epsilonflow \d+\.\d+\.\d+\n", call("--version").stdout)
    typed = {"_EPSILONFLOW_COMPLETE": "complete_bash", "COMP_WORDS": "epsilonflow le", "COMP_CWORD": "1"}
    offered = CliRunner().invoke(app, [], env=typed, prog_name="epsilonflow").stdout
    assert offered.split() == ["ledger"]


def test_the_ledger_shows_what_was_spent(here: Checkout) -> None:
    spent = here.artifact("metrics.json")["epsilon"]
    (shown,) = json.loads(call("ledger", "show", "--json").stdout)
    assert (shown["population"], shown["public"]) == ("digits", True)
    assert shown["spent"]["epsilon"] == pytest.approx(spent)
    assert shown["cap"]["epsilon"] - shown["spent"]["epsilon"] == pytest.approx(shown["remaining"]["epsilon"])
    rows = {cells[1]: cells[2] for cells in _cells(call("ledger", "show").stdout)}
    assert float(rows["spent"]) == pytest.approx(spent, rel=1e-4)
    words = "The chain holds, 3 rows; 2 prices are recomputed from the events of runs. Its head is "
    assert call("ledger", "verify").stdout.startswith(words)


def test_a_cap_is_changed_and_the_change_is_in_the_history(here: Checkout) -> None:
    (shown,) = json.loads(
        call("ledger", "cap", "digits", "--epsilon", "9", "--delta", "0.01", "--json").stdout
    )
    assert shown["cap"] == {"epsilon": 9.0, "delta": 0.01}
    kinds = [row["kind"] for row in json.loads(call("ledger", "history", "--json").stdout)]
    assert kinds == ["population", "reserve", "settle", "cap"]
    assert "settle" in call("ledger", "history", "digits").stdout


def test_a_run_is_forfeited(here: Checkout) -> None:
    here.ledger.reserve("killed", "digits", Budget(1.0, 1e-6), events=[], notes={})
    assert call("ledger", "forfeit", "killed", "--yes").exit_code == 0
    assert here.ledger.status("killed") == "forfeited"


def test_what_the_ledger_does_not_have_is_refused(here: Checkout) -> None:
    head = here.ledger.head()
    for arguments in (
        "cap nobody --epsilon 1 --delta 0.1",
        "cap digits --epsilon -1 --delta 0.1",
        "cap digits --epsilon nan --delta 0.1",
        "history nobody",
        "forfeit no-run",
    ):
        assert_refused(call("ledger", *arguments.split()), "")
    assert here.ledger.head() == head


def test_the_card_of_a_run_holds(here: Checkout) -> None:
    result = call("card", "verify", "artifacts/privacy_card.json")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("holds:") >= 8
    assert "FAILS" not in result.stdout and "not checked" not in result.stdout
    key = (here.home / "owner.pub").read_text().strip()
    (here.home / "owner.pub").write_bytes(b"\xff damaged")
    assert "FAILS: owner" in call("card", "verify").stdout
    assert public_key_of(signing_key(here.home)) == key == (here.home / "owner.pub").read_text().strip()
    (here.home / "owner.pub").unlink()
    assert "not checked: owner" in call("card", "verify").stdout
    (here.root / "kept.pub").write_text(f"{key}\n")
    for given in (key, "kept.pub"):
        assert "holds: owner (the expected key)" in call("card", "verify", "--key", given).stdout
    another = call("card", "verify", "--key", "a" * 64)
    assert another.exit_code == 1 and "FAILS: owner" in another.stdout
    assert_refused(call("card", "verify", "--key", "params.yaml"), "--key is no public key")
    assert_refused(call("card", "verify", "params.yaml"), "params.yaml is no privacy card")


def test_a_card_is_shown_in_sentences(here: Checkout) -> None:
    shown = call("card", "show")
    assert shown.exit_code == 0 and "when one record (one image) is" in shown.stdout
    assert call("card", "show", "artifacts/privacy_card.json").stdout == shown.stdout
    assert_refused(call("card", "show", "none.json"), "no file")


def test_a_card_that_nobody_signed_holds_only_where_that_is_asked_for(here: Checkout) -> None:
    path = here.root / "artifacts" / "privacy_card.json"
    path.write_bytes(load(path).sign(None).to_bytes())
    result = call("card", "verify")
    assert result.exit_code == 1 and "FAILS: signature (the card is not signed)" in result.stdout
    assert call("card", "verify", "--unsigned").exit_code == 0


def test_a_card_that_promises_more_than_its_events_fails(here: Checkout) -> None:
    path = here.root / "artifacts" / "privacy_card.json"
    card = json.loads(path.read_text())
    card["accounting"]["epsilon"]["pld"] = card["setting"]["epsilon"] = 0.1
    path.write_bytes(PrivacyCard.model_validate_json(json.dumps(card)).to_bytes())
    result = call("card", "verify", str(path))
    assert result.exit_code == 1
    assert "FAILS: epsilon by PLD" in result.stdout and "FAILS: signature" in result.stdout
    path.write_text(json.dumps(card))
    assert_refused(call("card", "verify", str(path)), "was edited")
    (here.root / "artifacts" / "model.safetensors").write_bytes(b"another model")
    path.write_bytes(PrivacyCard.model_validate_json(json.dumps(card)).to_bytes())
    assert "FAILS: model.safetensors" in call("card", "verify", str(path)).stdout


def test_outside_a_checkout_a_sentence_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for command in ("run", "plan"):
        assert_refused(call(command), "no checkout")
    assert_refused(call("card", "verify", "none.json"), "no file")


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/api", None])
def test_server_that_is_away_is_one_sentence(url: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = typer.Typer(cls=OneSentence)

    @commands.command()
    def first() -> None:
        try:
            raise httpx.ConnectError("refused")
        except httpx.ConnectError as error:
            raise RuntimeError("Failed to reach API") from error

    commands.command()(lambda: None)
    if url is not None:
        monkeypatch.setenv("PREFECT_API_URL", url)
    result = CliRunner().invoke(commands, ["first"])
    if url is None:
        assert isinstance(result.exception, RuntimeError)  # what failed is no server of Prefect's
    else:
        assert_refused(
            result, f"no Prefect server has its API at {url}; start one by `epsilonflow server start`"
        )


def test_status_of_no_server_says_how_to_start_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    assert_refused(call("server", "status"), "start one by `epsilonflow server start`")


@contextmanager
def answering(status: int, body: bytes) -> Iterator[str]:
    """The URL of a program that gives every request the same answer."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as served:
        Thread(target=served.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{served.server_port}"
        served.shutdown()


@pytest.mark.parametrize(("status", "body"), [(200, b"<html>"), (404, b"{}"), (401, b"{}")])
def test_url_without_its_path_is_one_sentence(
    status: int, body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefect's own client meets a page of its server, a path that is not there, and a question for a password."""
    commands = typer.Typer(cls=OneSentence)

    @commands.command()
    def first() -> None:
        with get_client(sync_client=True) as client:
            client.raise_for_api_version_mismatch()
            pytest.fail("no API answered")

    commands.command()(lambda: None)
    with answering(status, body) as url:
        monkeypatch.setenv("PREFECT_API_URL", url)
        with temporary_settings({PREFECT_API_URL: url, PREFECT_CLIENT_MAX_RETRIES: 0}):
            result = CliRunner().invoke(commands, ["first"])
    words = "asks for a password; set PREFECT_API_AUTH_STRING" if status == 401 else "has its API at"
    assert_refused(result, words)


@pytest.mark.parametrize("is_configured", [True, False])
def test_deploying_without_a_server_is_one_sentence(
    is_configured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And Prefect's own client, which hopes for a minute, is not asked."""
    if is_configured:
        monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    monkeypatch.setattr(server_commands, "DEFAULT_PORT", 9)
    monkeypatch.setattr("flows.server.keep_schedules", lambda: pytest.fail("Prefect is asked"))
    assert_refused(call("server", "deploy"), "no Prefect server has its API at http://127.0.0.1:9/api")


def _cells(table: str) -> list[list[str]]:
    rows = [line[1:-1].split("│") for line in table.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in row] for row in rows]


def test_the_doctor_says_what_is_off(here: Checkout, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shown = call("doctor")
    assert shown.exit_code == 0, shown.output
    assert "ok     ledger: the hash chain of 3 rows is intact; 1 population" in shown.stdout
    here.set("mode: offline", "mode: online")
    (here.home / "owner.key").chmod(0o644)
    monkeypatch.setenv("HOME", str(tmp_path))
    shown = call("doctor")
    assert shown.exit_code == 1
    assert "WRONG  Weights & Biases: tracking.mode is online, but you are not logged in" in shown.stdout
    assert "WRONG  owner key" in shown.stdout and "chmod 600" in shown.stdout
    monkeypatch.setenv("WANDB_BASE_URL", "https://tracking.example:8443")
    (tmp_path / ".netrc").write_text("machine tracking.example\n  login user\n  password 0123\n")
    assert "but you are not logged in" not in call("doctor").stdout
    (here.home / "owner.key").unlink()
    assert "owner.key is gone; restore it" in call("doctor").stdout
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    assert "but no Prefect server has its API at http://127.0.0.1:9/api; start one" in call("doctor").stdout
    monkeypatch.delenv("PREFECT_API_URL")
    small, large = SimpleNamespace(free=1e9), SimpleNamespace(free=1e12)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda folder: small if folder == here.home else large)
        assert f"WRONG  disk: 1 GB free in {here.home}; at least 5" in call("doctor").stdout
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    assert "torchvision was built for another torch than " in call("doctor").stdout
    monkeypatch.chdir(tmp_path)
    assert "WRONG  checkout" in call("doctor").stdout


def test_a_data_set_is_checked_for_its_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    columns = (
        number("age", 18, 100) | {"missing": 40},
        category("town", "Ulm", "Bonn, am Rhein"),
        label("back"),
    )
    declared = card(
        "own",
        records={"at_most": 100},
        classes=["no", "yes"],
        files={"train": {"path": "own.csv", "keyed_sha256": "0" * 64}},
        split={"salt": "own", "test_fraction": 0.5},
        reader=csv_of(*columns),
    )
    (tmp_path / "own.yaml").write_text(json.dumps(declared))
    rows = '17,"Bonn, am Rhein",no\n101,Ulm,yes\n,Trier,yes\n'
    rows += "".join(f"{age},Ulm,no\n" for age in range(20, 40))
    (tmp_path / "own.csv").write_text("age,town,back\n" + rows)
    refused = call("data", "check", "own.yaml")
    assert refused.exit_code == 2 and "another checksum" in refused.stderr
    (line,) = refused.stdout.splitlines()
    declared["files"]["train"]["keyed_sha256"] = line.rpartition("keyed_sha256: ")[2]
    (tmp_path / "own.yaml").write_text(json.dumps(declared))
    quiet = call("data", "check", "own.yaml")
    assert quiet.exit_code == 0, quiet.output
    assert "The private data set own can be read as its card declares" in quiet.stdout
    assert "train, column age: clamped to 100: more than a hundredth of the records" in quiet.stdout
    assert not [line for line in quiet.stdout.splitlines() if line[:1] == " "]  # no number
    counts = call("data", "check", "own.yaml", "--counts").stdout
    found = {
        line.strip().split("  ")[1]: int(line.split()[0]) for line in counts.splitlines() if line[:1] == " "
    }
    assert found == {
        "train: records": 23,
        "train, column age: missing, taken as 40.0": 1,
        "train, column age: clamped to 18": 1,
        "train, column age: clamped to 100": 1,
        "train, column town: counted as other": 1,
    }
    assert not (tmp_path / "ledger.sqlite").exists()
    text = (tmp_path / "own.csv").read_text()
    (tmp_path / "own.csv").write_text(text + "old,Ulm,maybe\n")
    assert "keyed_sha256: " in call("data", "check", "own.yaml").stdout


def test_the_help_is_in_groups_that_begin_with_setting_up() -> None:
    shown = call("--help").stdout
    titles = ["Set up", "Plan and run", "Use the model", "Check and budget"]
    assert [shown.index(title) for title in titles] == sorted(shown.index(title) for title in titles)
    assert shown.index("init ") < shown.index("doctor ") < shown.index("Plan and run")
    assert "─ Commands ─" not in shown  # each is in a group


def test_the_help_of_each_command_has_no_paragraph_that_breaks_in_the_middle() -> None:
    """Typer keeps the line breaks of all paragraphs but the first, which a narrow terminal breaks again."""

    def commands(group: typer.Typer) -> list[Any]:
        return group.registered_commands + [
            one for part in group.registered_groups for one in commands(part.typer_instance)
        ]

    texts = [inspect.getdoc(one.callback) or "" for one in commands(app)]
    assert len(texts) > 30
    assert [text for text in texts if any("\n" in part for part in text.split("\n\n")[1:])] == []

"""The command `epsilonflow`: what it says, what it refuses, and that it spends nothing unasked."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from algorithms.privacy.accounting.budget import Budget
from algorithms.privacy.card import PrivacyCard, load
from flows.cli.main import app
from tests.support.checkout import PROJECT, Checkout


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


def test_help_does_not_wait_for_torch_or_prefect() -> None:
    code = (
        "import sys; from flows.cli.main import app\n"
        "try: app(['run', '--help'])\n"
        "except SystemExit: pass\n"
        "print({'torch', 'prefect', 'pandas', 'sqlalchemy'} & set(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--epsilon" in done.stdout
    assert done.stderr == "set()\n"


def test_a_run_that_is_done_is_not_done_again(here: Checkout) -> None:
    head, files = here.ledger.head(), sorted(here.root.glob("artifacts/**/*"))
    for arguments in ((), ("--epsilon", "3"), ("--set", "algorithm.steps=5")):
        result = call("run", *arguments)
        assert result.exit_code == 0, result.output
        assert "Nothing was spent" in result.stdout
        assert "artifacts/report.html" in result.stdout
    assert here.ledger.head() == head
    assert sorted(here.root.glob("artifacts/**/*")) == files
    assert (here.home / "ledger.sqlite").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--dataset", "nist"), "no data set 'nist'"),
        (("--algorithm", "magic"), "no algorithm 'magic'"),
        (("--epsilon", "-1"), "privacy.epsilon"),
        (("--delta", "1"), "privacy.delta"),
        (("--set", "privacy.epsilom=1"), "unknown key privacy.epsilom"),
        (("--set", "privacy.epsilon"), "key=value"),
    ],
)
@pytest.mark.parametrize("command", ["run", "plan"])
def test_what_cannot_be_is_refused_and_nothing_changes(
    here: Checkout, command: str, arguments: tuple[str, ...], words: str
) -> None:
    head, params = here.ledger.head(), (here.root / "params.yaml").read_text()
    assert_refused(call(command, *arguments), words)
    assert here.ledger.head() == head
    assert (here.root / "params.yaml").read_text() == params


def test_a_plan_says_the_cost_and_spends_nothing(here: Checkout) -> None:
    here.ledger.set_cap("digits", Budget(6.0, 1e-3))
    head, params = here.ledger.head(), (here.root / "params.yaml").read_text()
    result = call("plan", "--epsilon", "1")
    assert result.exit_code == 0, result.output
    rows = {cells[0]: cells[1] for cells in _cells(result.stdout)}
    cost = float(rows["epsilon"].split(" by pld")[0])
    assert 0.99 < cost <= 1.0
    assert rows["steps"] == "5"
    assert rows["runs like this that fit"] == "3"
    assert rows["cap"].startswith("epsilon 6, delta 0.001; that of the data card no longer counts")
    assert here.ledger.head() == head
    assert (here.root / "params.yaml").read_text() == params


def test_a_plan_says_what_the_attack_that_is_its_target_achieves(here: Checkout) -> None:
    target = ("privacy.target={false_alarms: 0.01, caught: 0.05}", "privacy.epsilon=null")
    result = call("plan", *(word for setting in target for word in ("--set", setting)))
    assert result.exit_code == 0, result.output
    said = {cells[0]: cells[1] for cells in _cells(result.stdout)}["an attacker"]
    found = float(said.removeprefix("recognises at most ").split("%")[0])
    assert 4.5 < found <= 5.0
    assert said.endswith("5.00% is allowed")


@pytest.mark.parametrize(
    ("algorithm", "words"), [("dpis", r"at most \d+\.?\d*, chosen by epoch"), ("dp_agd", "chosen on the way")]
)
def test_a_plan_gives_no_number_for_noise_that_is_chosen_on_the_way(
    here: Checkout, algorithm: str, words: str
) -> None:
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
    assert "cap of population adult, not charged so far" in result.stdout
    assert "adult" not in here.ledger.populations()


@pytest.mark.parametrize("preset", sorted((PROJECT / "presets").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_preset_is_planned_as_it_stands(here: Checkout, preset: Path) -> None:
    shutil.copyfile(preset, here.root / "params.yaml")
    result = call("plan")
    assert result.exit_code == 0, result.output
    assert "epsilon" in {cells[0] for cells in _cells(result.stdout)}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--delta", "0.01"), "at most"),
        (("--set", "algorithm.expected_batch_size=100000"), "algorithm.expected_batch_size"),
        (("--set", "model.name=logistic"), "2 classes"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(here: Checkout, arguments: tuple[str, ...], words: str) -> None:
    assert_refused(call("plan", *arguments), words)


def test_the_ledger_shows_what_was_spent(here: Checkout) -> None:
    spent = here.artifact("metrics.json")["epsilon"]
    (shown,) = json.loads(call("ledger", "show", "--json").stdout)
    assert (shown["population"], shown["public"]) == ("digits", True)
    assert shown["spent"]["epsilon"] == pytest.approx(spent)
    assert shown["cap"]["epsilon"] - shown["spent"]["epsilon"] == pytest.approx(shown["remaining"]["epsilon"])
    rows = {cells[1]: cells[2] for cells in _cells(call("ledger", "show").stdout)}
    assert float(rows["spent"]) == pytest.approx(spent, rel=1e-4)


def test_a_cap_is_changed_and_the_change_is_in_the_history(here: Checkout) -> None:
    (shown,) = json.loads(
        call("ledger", "cap", "digits", "--epsilon", "9", "--delta", "0.01", "--json").stdout
    )
    assert shown["cap"] == {"epsilon": 9.0, "delta": 0.01}
    kinds = [row["kind"] for row in json.loads(call("ledger", "history", "--json").stdout)]
    assert kinds == ["population", "reserve", "settle", "cap"]
    assert "settle" in call("ledger", "history", "--population", "digits").stdout


def test_a_run_is_forfeited(here: Checkout) -> None:
    here.ledger.reserve("killed", "digits", Budget(1.0, 1e-6), events=[], about={})
    assert call("ledger", "forfeit", "killed").exit_code == 0
    assert here.ledger.status("killed") == "forfeited"


@pytest.mark.parametrize(
    "arguments",
    [
        ("cap", "nobody", "--epsilon", "1", "--delta", "0.1"),
        ("cap", "digits", "--epsilon", "-1", "--delta", "0.1"),
        ("cap", "digits", "--epsilon", "nan", "--delta", "0.1"),
        ("history", "--population", "nobody"),
        ("forfeit", "no-run"),
    ],
)
def test_what_the_ledger_does_not_have_is_refused(here: Checkout, arguments: tuple[str, ...]) -> None:
    head = here.ledger.head()
    assert_refused(call("ledger", *arguments), "")
    assert here.ledger.head() == head


def test_the_card_of_a_run_holds(here: Checkout) -> None:
    result = call("card", "verify", "artifacts/privacy_card.json")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("holds:") >= 8
    assert "FAILS" not in result.stdout and "not checked" not in result.stdout
    key = (here.home / "owner.pub").read_text().strip()
    (here.home / "owner.pub").unlink()
    assert "not checked: owner" in call("card", "verify").stdout
    assert "holds: owner (the given key)" in call("card", "verify", "--key", key).stdout
    another = call("card", "verify", "--key", "a" * 64)
    assert another.exit_code == 1 and "FAILS: owner" in another.stdout


def test_a_card_is_shown_in_sentences(here: Checkout) -> None:
    shown = call("card", "show")
    assert shown.exit_code == 0 and "when one record (one image) is" in shown.stdout
    assert call("card", "show", "artifacts/privacy_card.json").stdout == shown.stdout
    assert_refused(call("card", "show", "none.json"), "no file")


def test_a_card_that_nobody_signed_holds_only_where_that_is_asked_for(here: Checkout) -> None:
    path = here.root / "artifacts" / "privacy_card.json"
    path.write_bytes(load(path).signed(None).to_bytes())
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


def test_a_model_of_another_run_fails_its_card(here: Checkout) -> None:
    (here.root / "artifacts" / "model.safetensors").write_bytes(b"another model")
    result = call("card", "verify", "artifacts/privacy_card.json")
    assert result.exit_code == 1
    assert "FAILS: model.safetensors" in result.stdout


@pytest.mark.parametrize("command", ["run", "plan", "ledger show", "ledger history"])
def test_outside_a_checkout_a_sentence_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert_refused(call(*command.split()), "no checkout")


def test_no_card_is_refused(tmp_path: Path) -> None:
    assert_refused(call("card", "verify", str(tmp_path / "none.json")), "no file")


def _cells(table: str) -> list[list[str]]:
    rows = [line[1:-1].split("│") for line in table.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in row] for row in rows]

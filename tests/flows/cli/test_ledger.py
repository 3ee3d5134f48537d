"""The command `epsilonflow ledger` on a ledger with blocks, and older copies of it that are put back."""

import json
import math
import re
import shutil
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from algorithms.privacy.accounting import Budget
from algorithms.privacy.card import build
from algorithms.privacy.ledger import Composition, Ledger, forecast, identity
from flows.cli.main import app
from flows.deployed import BROKEN
from flows.scheduled import verify
from tests.algorithms.privacy.card.charged_run import charge
from tests.algorithms.privacy.conftest import KEY
from tests.support.synthetic_run import record, write_run

PARAMS = Path(__file__).parents[3] / "params.yaml"
EVENTS = [{"event": {"type": "GaussianDpEvent", "noise_multiplier": 4.0}, "count": 1}]


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["ledger", *arguments], env={"COLUMNS": "200"})


@pytest.fixture
def ledger(tmp_path: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch) -> Ledger:
    """In a folder that looks like a checkout: two blocks under zCDP, one of them charged."""
    (tmp_path / "dvc.yaml").touch()
    (tmp_path / ".dvc").mkdir()
    shutil.copy(PARAMS, tmp_path / "params.yaml")
    monkeypatch.chdir(tmp_path)
    ledger = Ledger.open(f"sqlite:///{own_home}/ledger.sqlite")
    zcdp = Composition("zcdp")
    ledger.declare("patients", Budget(8.0, 1e-5), public=False, composition=zcdp, blocks_per_person=2)
    for block in ("january", "february"):
        assert call("block", "patients", block).exit_code == 0
    ledger.reserve("a", "patients", Budget(1.0, 1e-6), events=EVENTS, notes={}, blocks=("january",))
    return ledger


def test_a_ledger_without_populations_says_so(
    own_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call("show").stdout == "The ledger has no population yet; the first run on one declares it.\n"
    assert json.loads(call("show", "--json").stdout) == []


def test_blocks_are_shown_one_by_one_with_their_unit(ledger: Ledger) -> None:
    shown = json.loads(call("show", "--json").stdout)
    assert [(row["block"], row["reserved"]["epsilon"] > 0) for row in shown] == [
        ("january", True),
        ("february", False),
    ]
    assert shown[0]["composition"] == {"kind": "zcdp"}
    assert shown[0]["blocks_per_person"] == 2
    text = " ".join(call("show").stdout.split())
    assert (
        "patients: for one person with at most 2 records; composed by zCDP, so epsilons do not add up" in text
    )
    assert "nobody's loss is above that of the most charged block: blocks do not add up." in text
    assert "february" in call("history").stdout


def test_it_shows_what_one_more_run_and_ten_more_would_take(
    own_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At order 8, where a Gaussian of multiplier 4 has a divergence of 8 / (2 * 4^2) and delta 1e-5 costs 1.214."""
    monkeypatch.chdir(tmp_path)
    ledger = Ledger.open(f"sqlite:///{own_home}/ledger.sqlite")
    ledger.declare("patients", Budget(9.0, 1e-5), public=False, composition=Composition("renyi", 8.0))
    assert "more run" not in call("show").stdout
    for run_id in "ab":
        ledger.reserve(run_id, "patients", Budget(1.0, 1e-6), events=EVENTS, notes={})
    conversion = math.log(7 / 8) - math.log(8e-5) / 7
    shown = re.search(
        r"patients: with one more run like the last one epsilon (\S+) would be spent,"
        r" and ten more would make it (\S+)\.",
        " ".join(call("show").stdout.split()),
    )
    assert shown is not None
    for text, runs in zip(shown.groups(), (3, 12), strict=True):
        assert float(text) == pytest.approx(runs * 0.25 + conversion, rel=1e-4)
    note = "patients: composed by Rényi at order 8.0, so epsilons do not add up"
    assert note in " ".join(call("show").stdout.split())
    ledger.set_cap("patients", Budget(3.0, 1e-5))
    assert "with one more run like the last one epsilon 1.96" in " ".join(call("show").stdout.split())
    assert "ten more would exceed the cap." in " ".join(call("show").stdout.split())


def test_a_block_has_a_cap_of_its_own_and_retires(ledger: Ledger) -> None:
    assert call("cap", "patients", "--epsilon", "2", "--delta", "1e-6", "--block", "january").exit_code == 0
    assert call("block", "patients", "march", "--epsilon", "3").exit_code == 0
    assert call("retire", "patients", "february", "--yes").exit_code == 0
    assert ledger.balance("patients", "january").cap == Budget(2.0, 1e-6)
    assert ledger.balance("patients", "march").cap == Budget(3.0, 1e-5)
    assert "february (retired)" in call("show").stdout
    assert call("retire", "patients", "june").exit_code == 2


def test_a_forecast_says_how_many_more_fit_and_when_blocks_retire(ledger: Ledger) -> None:
    result = call("forecast", "patients", "--planned", "4", "--every", "30", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["fit"] == 4  # february has 4, january 3 since one is reserved
    retired = {name: row["day"] for row in found["retrainings"] for name in row["retires"]}
    assert retired == {"january": 90.0, "february": 120.0}
    assert found["composition"] == "zCDP"
    text = call(
        "forecast", "patients", "--planned", "4", "--new-blocks", "--policy", "last", "--window", "4"
    ).stdout
    assert "The caps allow at least 1000 more retrainings of population patients." in text
    assert "one retraining alone, as zCDP counts it at delta 1e-05. Its card claims no more" in " ".join(
        text.split()
    )
    each = json.loads(call("forecast", "patients", "--epsilon", "8", "--policy", "newest", "--json").stdout)
    assert each["fit"] == 0  # every charge counts twice
    assert "0 of 2 blocks can pay for this retraining" in each["end"]
    before = ledger.head()
    assert call("forecast", "nobody", "--planned", "3").exit_code == 2
    assert call("forecast", "patients", "--every", "0").exit_code == 2
    assert ledger.head() == before


def test_a_retraining_below_what_a_composition_counts_is_not_forecast_as_free(ledger: Ledger) -> None:
    """At order 6 and delta 1e-5 any release counts at least log(5/6) - log(6e-5) / 5 = 1.762."""
    ledger.declare("guests", Budget(6.0, 1e-5), public=False, composition=Composition("renyi", 6.0))
    assert call("forecast", "guests", "--epsilon", "1.8").exit_code == 0
    refused = call("forecast", "guests", "--epsilon", "0.5")
    assert refused.exit_code == 2 and "at least epsilon 1.762 for a retraining" in " ".join(
        refused.output.split()
    )


def test_hourly_retrainings_are_forecast_by_the_hour(ledger: Ledger) -> None:
    shown = call("forecast", "patients", "--planned", "4", "--every", str(1 / 24)).stdout
    rows = [[cell.strip() for cell in line.split("│")[1:3]] for line in shown.splitlines() if "│" in line]
    assert "hour" in shown and rows[:3] == [["1", "1"], ["2", "2"], ["3", "3"]]


def test_the_commands_that_are_used_most_are_listed_first(ledger: Ledger) -> None:
    lines = [line.strip("│ ").split() for line in call("--help").stdout.splitlines() if line.startswith("│ ")]
    names = [words[0] for words in lines if words]
    assert [name for name in names if name in ("show", "forfeit", "backup", "init")] == [
        *("show", "forfeit", "backup", "init")
    ]


def test_a_forecast_takes_what_a_retraining_plans(ledger: Ledger) -> None:
    Path("retrain.yaml").write_text(
        "{name: visits, dataset: visits, every: day, blocks: {policy: last, window: 1},"
        " spread: {policy: geometric, fraction: 0.5}, smallest: 0.1}"
    )
    blocks, spread = ["--policy", "last", "--window", "1"], ["--spread", "geometric", "--fraction", "0.5"]
    planned = call("forecast", "patients", "--json", "--from", "retrain.yaml").stdout
    assert (
        planned
        == call(
            "forecast", "patients", "--json", *blocks, *spread, "--smallest", "0.1", "--every", "1"
        ).stdout
    )
    assert json.loads(planned)["fit"] == 6  # each block pays a half, a quarter and an eighth
    assert call("forecast", "patients", "--from", "none.yaml").exit_code == 2


def test_a_forecast_has_a_default_and_is_short(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(forecast.__kwdefaults__, "horizon", 100)
    shown = call("forecast", "patients")
    assert shown.exit_code == 0, shown.output
    assert "spread over 52 retrainings; see --planned and --epsilon" in shown.stdout
    long = call("forecast", "patients", "--epsilon", "0.001", "--new-blocks")
    assert "88 more; --json has all" in long.stdout and len(long.stdout.splitlines()) < 25
    ledger.declare("clients", Budget(10.0, 1e-4), public=False)
    ledger.reserve("one", "clients", Budget(1.0, 1e-6), events=EVENTS, notes={})
    assert "allow 9 more retrainings" in call("forecast", "clients", "--epsilon", "1").stdout


def test_a_forecast_of_nothing_is_a_sentence(ledger: Ledger) -> None:
    said = call("forecast", "patients", "--epsilon", "8").stdout
    assert said.startswith("The caps allow no more retrainings of population patients: 0 of 2 blocks can pay")
    assert "retires" not in said and said.count("\n") == 1
    ends = call("forecast", "patients", "--planned", "4").stdout.splitlines()[-1]
    assert ends.startswith("Then every block has retired, so")


@pytest.mark.parametrize("left", [0.0, 1e-9])
def test_a_forecast_promises_nothing_where_epsilon_is_used_up_and_delta_is_not(
    ledger: Ledger, left: float
) -> None:
    ledger.declare("clients", Budget(1.0 + left, 1e-3), public=False)
    ledger.reserve("b", "clients", Budget(1.0, 1e-6), events=EVENTS, notes={})
    said = call("forecast", "clients").stdout.splitlines()[-1]
    assert said.startswith("The caps allow no more retrainings of population clients")


def test_no_ledger_is_made_where_each_copy_of_a_checkout_would_have_one(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert call("init", "sqlite:///other.sqlite").exit_code == 2
    monkeypatch.setenv("EPSILONFLOW_LEDGER_URL", f"sqlite:///{tmp_path}/other.sqlite")
    assert call("init").exit_code == 2
    assert not list(tmp_path.glob("other.sqlite"))


def test_the_history_keeps_run_ids_whole_in_80_columns(ledger: Ledger) -> None:
    run_id = "5f0c3a9be1d27746-1"
    ledger.reserve(run_id, "patients", Budget(0.25, 1e-7), events=EVENTS, notes={}, blocks=("january",))
    shown = CliRunner().invoke(app, ["ledger", "history"], env={"COLUMNS": "80"})
    assert run_id in shown.stdout
    assert max(map(len, shown.stdout.splitlines())) <= 80
    assert shown.stdout.splitlines()[0].split()[2:] == ["what", "population", "run", "epsilon", "delta"]
    assert "patients, block" in shown.stdout and "population" in shown.stdout.splitlines()[1]
    assert len(re.findall(r"^\d+ +\d{4}-\d\d-\d\d \d\d:\d\d ", shown.stdout, flags=re.MULTILINE)) == len(
        ledger.history()
    )


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_disk_that_has_no_room_for_the_output_is_one_sentence(
    ledger: Ledger,
    options: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with suppress(OSError), Path("/dev/full").open("w", buffering=1) as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(SystemExit, match="2"):
            app(["ledger", "show", *options])
    assert capsys.readouterr().err.startswith("refused: the disk is full")


def test_overruling_a_block_that_nobody_declared_is_said(ledger: Ledger) -> None:
    said = "there is no block 'febuary' yet"
    assert said in " ".join(call("overrule", "patients", "febuary", "january").stdout.split())
    assert "there is no block" not in call("overrule", "patients", "february", "january").stdout


def test_what_cannot_be_undone_is_asked_first(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    head = ledger.head()
    for arguments in (("retire", "patients", "february"), ("forfeit", "a")):
        refused = call(*arguments)
        assert refused.exit_code == 2 and "give --yes" in refused.stderr
    assert ledger.head() == head
    unknown = call("forfeit", "5f0c-1").stderr
    assert "no reservation of run '5f0c-1'; `epsilonflow ledger history` lists those it has" in unknown


def test_a_chain_is_verified_exported_and_restored(ledger: Ledger, tmp_path: Path, own_home: Path) -> None:
    result = call("verify", "--head", ledger.head())
    assert result.exit_code == 0
    assert "The chain holds, 4 rows; one price is recomputed from the events of runs" in result.stdout
    assert call("backup", "copy.jsonl").exit_code == 0
    assert call("restore", "copy.jsonl", "--to", f"sqlite:///{tmp_path}/new.sqlite").exit_code == 0
    assert Ledger.open(f"sqlite:///{tmp_path}/new.sqlite").head() == ledger.head()
    assert call("restore", "copy.jsonl", "--to", f"sqlite:///{own_home}/ledger.sqlite").exit_code == 2
    (tmp_path / "card.json").write_bytes(build(record(write_run(tmp_path / "run"))).to_bytes())
    for arguments in (("--head", "f" * 64), ("--card", "card.json")):
        refused = call("verify", *arguments)
        assert refused.exit_code == 2
        assert "rows were cut off or an older copy was put back" in refused.stderr
    (tmp_path / "card.json").write_text("{}")
    assert "is not complete and correct" in call("verify", "--card", "card.json").stderr


def test_a_card_is_compared_with_the_settlement_of_its_run(ledger: Ledger, tmp_path: Path) -> None:
    made = charge(ledger, record(write_run(tmp_path / "run")))
    (tmp_path / "card.json").write_bytes(made.to_bytes())
    result = call("verify", "--card", "card.json")
    assert result.exit_code == 0, result.output
    assert "The card has the same events, cost, model and key" in result.stdout
    assert "The card" not in call("verify").stdout
    cut = made.model_copy(update={"events": made.events[:1]})
    (tmp_path / "card.json").write_bytes(cut.sign(KEY).to_bytes())
    refused = call("verify", "--card", "card.json")
    assert refused.exit_code == 2
    assert "differ in events; ask for the card that the run wrote" in refused.stderr


def test_an_older_copy_that_is_put_back_is_refused_by_what_the_home_saw(
    ledger: Ledger, own_home: Path
) -> None:
    call("backup", "old.jsonl")
    ledger.settle("a", Budget(1.0, 1e-6), events=EVENTS)
    assert call("show").exit_code == 0
    (own_home / "ledger.sqlite").unlink()
    assert call("restore", "old.jsonl", "--to", f"sqlite:///{own_home}/ledger.sqlite").exit_code == 0
    refused = call("show")
    assert refused.exit_code == 2
    assert "an older copy was put back; restore the newest copy, or remove" in refused.stderr
    shutil.rmtree(own_home / "ledger_heads")
    assert call("show").exit_code == 0


def test_an_older_copy_that_is_put_back_is_refused_by_the_receipt_of_a_run(
    ledger: Ledger, tmp_path: Path, own_home: Path
) -> None:
    artifacts = tmp_path / "artifacts"
    artifacts.mkdir()
    call("backup", "old.jsonl")
    ledger.forfeit("a")
    kept = {"ledger": {"first": identity(ledger), "head": ledger.head()}}
    shutil.rmtree(own_home)
    call("restore", "old.jsonl", "--to", f"sqlite:///{own_home}/ledger.sqlite")
    (artifacts / "receipt.json").write_text(json.dumps(kept))
    assert f"no row with the hash {kept['ledger']['head'][:16]}" in call("show").stderr
    for other in ({}, {"ledger": {"head": "f" * 64}}, {"ledger": {"first": "e" * 64, "head": "f" * 64}}):
        (artifacts / "receipt.json").write_text(json.dumps(other))
        assert call("show").exit_code == 0


def test_an_older_copy_at_another_url_is_an_older_copy_too(
    ledger: Ledger, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"sqlite:///{own_home}/copy.sqlite"
    call("backup", "old.jsonl")
    ledger.forfeit("a")
    assert call("show").exit_code == 0
    assert call("restore", "old.jsonl", "--to", url).exit_code == 0
    with monkeypatch.context() as patch:
        patch.setenv("EPSILONFLOW_LEDGER_URL", url)
        assert "an older copy was put back" in call("show").stderr
    assert call("show").exit_code == 0


def test_a_verification_goes_on_from_the_checkpoint_that_this_home_signed(
    ledger: Ledger, own_home: Path
) -> None:
    assert "The chain holds, 4 rows; one price is" in call("verify").stdout
    ledger.settle("a", Budget(1.0, 1e-6), events=EVENTS)
    again = call("verify", "--resume")
    assert "The chain holds, 5 rows, 1 of them read now; one price" in again.stdout
    (kept,) = (own_home / "ledger_checkpoints").iterdir()
    text = kept.read_text()
    kept.write_text(text.replace('"priced": true', '"priced": false'))
    refused = call("verify", "--resume")
    assert (refused.exit_code, "not one that the owner's key" in refused.stderr) == (2, True)
    kept.write_text(text)
    call("backup", "old.jsonl")
    ledger.set_cap("patients", Budget(9.0, 1e-5))
    call("verify", "--resume")
    shutil.rmtree(own_home / "ledger_heads")
    (own_home / "ledger.sqlite").unlink()
    call("restore", "old.jsonl", "--to", f"sqlite:///{own_home}/ledger.sqlite")
    assert "of the checkpoint: rows were cut off" in call("verify", "--resume").stderr


def test_balances_that_were_changed_beside_the_rows_are_found_and_derived_again(
    ledger: Ledger, tmp_path: Path, own_home: Path
) -> None:
    with ledger._store.database.engine.begin() as connection:
        connection.exec_driver_sql("UPDATE epsilonflow_account SET open = '' WHERE block = 'january'")
    refused = call("verify")
    assert refused.exit_code == 2
    assert "in the balance of population 'patients', block 'january'" in refused.stderr
    call("backup", "rows.jsonl")
    call("restore", "rows.jsonl", "--to", f"sqlite:///{tmp_path}/new.sqlite")
    again = Ledger.open(f"sqlite:///{tmp_path}/new.sqlite")
    again.verify()
    assert again.balance("patients", "january").reserved.epsilon > 0


def test_an_owner_registers_a_population_before_anybody_runs(ledger: Ledger, tmp_path: Path) -> None:
    shutil.copytree(PARAMS.parent / "data" / "cards", tmp_path / "data" / "cards")
    found = json.loads(call("register", "--json").stdout)
    assert [row["population"] for row in found] == [ledger.populations()[-1]] != ["patients"]
    head = ledger.head()
    assert call("register").exit_code == 0
    assert ledger.head() == head
    assert json.loads(call("show", "patients", "--json").stdout)[0]["population"] == "patients"
    assert call("show", "nobody").exit_code == 2
    said = " ".join(call("init").stdout.split())
    assert "An SQLite file has no roles" in said


def test_the_nightly_flow_ends_in_a_state_of_which_people_are_told(ledger: Ledger, own_home: Path) -> None:
    assert verify.fn().message == "the chain holds, 4 rows, 4 of them read now."
    ledger.forfeit("a")
    assert verify.fn().message == "the chain holds, 5 rows, 1 of them read now."
    with ledger._store.database.engine.begin() as connection:
        connection.exec_driver_sql("UPDATE epsilonflow_run SET status = 'open'")
    assert verify.fn(from_the_first_row=True).name == BROKEN


def test_outside_of_every_checkout_it_is_the_ledger_of_the_home(
    ledger: Ledger,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown, within = call("show").stdout, tmp_path / "notes"
    within.mkdir()
    monkeypatch.chdir(within)
    # shown by the params.yaml of the checkout above, which may name another ledger
    assert call("show").stdout == shown
    monkeypatch.chdir(tmp_path_factory.mktemp("notebooks"))
    assert call("show").stdout == shown

"""A project of one's own: made of what its owner declares, and usable at once."""

import contextlib
import errno
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image
from prefect.flows import load_flow_from_entrypoint
from ruamel.yaml import YAML
from typer.testing import CliRunner, Result

from data.card import data_card
from data.cells import CellSettings
from data.formats import Categorical, Csv, Hashed, Numeric, Texts, Timestamp
from data.targets import Count, Labels, NextToken, Number, Quantile, Tags, Target
from flows.cli.main import app
from tasks.config import new_project
from tasks.config.new_project import TEMPLATES
from tasks.config.params import ParamsRefusedError
from tasks.runs.dvc_stages import checkout
from tests.support.checkout import PROJECT
from tests.support.modes import open_to_others, open_umask
from tests.support.one_process import dvc_here, stay_in_this_process
from tests.support.public_texts import publish
from tests.support.soak import soak_but

FIELDS = [
    {"name": "age", "constraints": {"minimum": 18, "maximum": 100}},
    {"name": "distance_km", "constraints": {"minimum": 0, "maximum": 50}},
    {"name": "insurance", "constraints": {"enum": ["public", "private", "none"]}},
    {"name": "reason", "constraints": {"enum": ["pain", "check-up", "injury", "vaccination"]}},
    {"name": "returned", "constraints": {"enum": ["no", "yes"]}},
]


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})


@pytest.fixture(scope="module")
def begun_by_dvc(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What DVC makes of a folder that has a git repository of its own."""
    folder = tmp_path_factory.mktemp("begun") / "folder"
    subprocess.run(["git", "init", "--quiet", str(folder)], check=True)
    with contextlib.chdir(folder):
        assert dvc_here("init", "--quiet")[0] == 0
    return folder


@pytest.fixture(autouse=True)
def dvc_begins_here(monkeypatch: pytest.MonkeyPatch, begun_by_dvc: Path) -> None:
    """What `init` starts for DVC is copied, or done in this process, which has imported DVC.

    The project that is made and used, and those in the repository of others, are left to DVC itself.
    """

    def run(command: list[str], *, cwd: Path, **how: Any) -> "subprocess.CompletedProcess[str] | None":
        if command[1:4] != ["-P", "-m", "dvc"]:
            return subprocess.run(command, cwd=cwd, **how)
        if command[4:] == ["init", "--quiet"]:
            shutil.copytree(begun_by_dvc, cwd, dirs_exist_ok=True, ignore=lambda *_: [".git"])
            return None
        with contextlib.chdir(cwd):
            assert dvc_here(*command[4:])[0] == 0
        return None

    monkeypatch.setattr(new_project, "subprocess", SimpleNamespace(run=run))


@pytest.fixture
def schema(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "schema.json").write_text(json.dumps({"fields": FIELDS}))
    return "schema.json"


def test_a_project_is_made_from_a_schema_and_can_be_used(
    schema: str, tmp_path: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(new_project, "subprocess", subprocess)
    table = PROJECT / "examples/own_data/visits.csv"
    with open_umask():
        made = call("init", "clinic", "--from", schema, "--file", str(table), "--at-most", "20000")
    assert open_to_others(tmp_path / "clinic/datasets") == []
    assert made.exit_code == 0, made.output
    card = data_card("clinic", tmp_path / "clinic/data/cards")
    assert (card.public, card.records.at_most, card.classes, card.reader.kind) == (
        False,
        20000,
        ("no", "yes"),
        "csv",
    )
    monkeypatch.chdir(tmp_path / "clinic")
    tracked = subprocess.run(
        ["git", "status", "--short", "-uall"], capture_output=True, text=True, check=True
    ).stdout
    assert "datasets" not in tracked
    assert [line for line in tracked.splitlines() if "data/cards/" in line] == ["?? data/cards/clinic.yaml"]
    checked = call("data", "check", "clinic")
    assert checked.exit_code == 0 and "can be read as its card declares" in checked.stdout
    plan = call("plan")
    assert plan.exit_code == 0, plan.output
    assert re.search(r"delta *│ 1e-06", plan.stdout) or "1e-06" in plan.stdout
    stay_in_this_process(monkeypatch)
    for _ in range(2):  # the second time it is there
        done = call("run", "--set", "algorithm.steps=2", "--set", "tracking.mode=disabled")
        assert done.exit_code == 0 and "test accuracy" in done.stdout, done.output
        # DVC's umask in this process is that of the tests, and it copies what it has stored.
        assert open_to_others(Path("datasets")) == [] and Path(".dvc/cache").stat().st_mode & 0o077 == 0
    assert open_to_others(own_home / "ledger.sqlite") == open_to_others(own_home / "runs") == []
    assert done.stdout.startswith("existing result, nothing charged:\n") and "training" not in done.output
    stages = Path("dvc.yaml").read_text()
    Path("dvc.yaml").write_text(stages.replace("python -P -m", "python -m"))  # as in an older project
    again = call("run")  # DVC runs the stage again, which finds its run
    assert "existing result, nothing charged: run" in again.stderr and "training" not in again.output
    assert again.stdout.startswith("existing result, nothing charged:\n")
    Path("dvc.yaml").write_text(stages)
    assert call("card", "verify").exit_code == 0
    Path("tune.yaml").write_text(
        "{space: {algorithm.clip_norm: [0.5, 1.0]}, epsilon: 3.0, trials: {mean: 1.5}, objective: {on: private}}"
    )
    found = call("tune")
    assert found.exit_code == 0 and "the winner of search" in found.stdout, found.output
    assert open_to_others(own_home / "runs") == open_to_others(Path("datasets")) == []
    Path("tune.yaml").unlink()
    identity = ["-c", "user.name=Test", "-c", "user.email=test@example.org"]
    for command in (["add", "--all"], [*identity, "commit", "--quiet", "--message", "a project"]):
        subprocess.run(["git", *command], check=True)
    left = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True).stdout.splitlines()
    assert {path.split("/")[0] for path in left} == {
        *(".dvc", ".dvcignore", ".gitignore", "data", "requirements.txt"),
        *("dvc.lock", "dvc.yaml", "params.yaml", "prefect.yaml"),
    }
    assert "data is a folder; give a table" in call("predict", "data").stderr
    card_file = tmp_path / "clinic/data/cards/clinic.yaml"
    declared = card_file.read_text()
    known = re.findall(r"keyed_sha256: (\w{64})", declared)[0]
    card_file.write_text(declared.replace(known, "0" * 64))
    assert f"its card needs  keyed_sha256: {known}" in call("data", "check", "clinic").stdout
    refused = call("init", ".", "--from", "../schema.json", "--at-most", "10")
    assert refused.exit_code == 2 and "is not empty" in refused.stderr


def git(where: Path, *arguments: str) -> str:
    identity = [
        "-c",
        "user.name=Test",
        "-c",
        "user.email=test@example.org",
        "-c",
        "protocol.file.allow=always",
    ]
    done = subprocess.run(
        ["git", *identity, *arguments], cwd=where, capture_output=True, text=True, check=True
    )
    return done.stdout


def outer_repository(place: Path) -> Path:
    place.mkdir(parents=True)
    git(place, "init", "--quiet")
    (place / "README.md").write_text("Ours.")
    git(place, "add", "--all")
    git(place, "commit", "--quiet", "--message", "start")
    return place


def worktree(place: Path) -> Path:
    git(outer_repository(place / "first"), "worktree", "add", "--quiet", "../second")
    return place / "second"


def submodule(place: Path) -> Path:
    part, whole = outer_repository(place / "part"), outer_repository(place / "whole")
    git(whole, "submodule", "--quiet", "add", str(part), "inner")
    return whole / "inner"


OUTER = (outer_repository, worktree, submodule)
COMMITTED = [(outer_repository, "clinic"), (worktree, "teams/a b/clinic"), (submodule, "clinic")]


@pytest.mark.parametrize(
    ("outer", "name"), soak_but(COMMITTED, product(OUTER, ("clinic", "teams/a b/clinic")))
)
def test_a_project_in_a_repository_is_committed_with_it(
    schema: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outer: Callable[[Path], Path], name: str
) -> None:
    repository = outer(tmp_path / "outer")
    monkeypatch.chdir(repository)
    made = call("init", name, "--from", str(tmp_path / schema), "--at-most", "20000")
    assert made.exit_code == 0, made.output
    assert not (repository / name / ".git").exists()
    git(repository, "add", "--all")
    git(repository, "commit", "--quiet", "--message", "a project")
    names = git(repository, "ls-files", "-z").split("\0")
    assert {f"{name}/dvc.yaml", f"{name}/.dvc/config", f"{name}/params.yaml"} <= set(names)
    monkeypatch.chdir(repository / name / "data" / "cards")
    assert checkout() == (repository / name).resolve()
    planned = call("plan")  # finds the project, and says what is still to do in it
    assert planned.exit_code == 2 and "datasets/raw/clinic.csv" in planned.stderr, planned.output
    assert "ok     checkout: params.yaml is valid" in call("doctor").stdout


def test_a_project_where_the_outer_repository_ignores_it_has_its_own(
    schema: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = outer_repository(tmp_path / "outer")
    (repository / ".gitignore").write_text("/own\n")
    monkeypatch.chdir(repository)
    made = call("init", "own", "--from", str(tmp_path / schema), "--at-most", "20000")
    assert made.exit_code == 0, made.output
    assert (repository / "own/.git").is_dir()
    git(repository, "add", "--all")


@pytest.mark.parametrize("fails", [False, True])
def test_a_project_is_made_in_a_repository_that_is_there_and_empty(
    schema: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    place = tmp_path / "clinic"
    place.mkdir()
    git(place, "init", "--quiet")
    monkeypatch.chdir(place)
    if fails:
        monkeypatch.setattr(new_project, "version", lambda _: 1 / 0)
    made = call("init", ".", "--from", "../schema.json", "--at-most", "20000")
    assert (made.exit_code == 0) is not fails, made.output
    git(place, "add", "--all")
    assert ("dvc.yaml" in git(place, "ls-files")) is not fails
    assert (len([*place.iterdir()]) == 1) is fails


def test_columns_are_asked_for_and_a_slip_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("flows.cli.projects.sys", SimpleNamespace(stdin=SimpleNamespace(isatty=lambda: True)))
    label = ["returned", "classes", "class", "no", "no,yes"]
    notes = ["", "notes", "ignored", ""]
    age = ["age", "numbers", "numeric", "old", "100,18", "0,inf", "18,100", "age", "returned"]
    other = ["insurance", "Categorical ", "public", "public, private", ""]
    typed = "\n".join([*label, *notes, *age, *other, "-5", "20000", "", ""])
    made = CliRunner().invoke(app, ["init", "clinic"], input=typed, env={"COLUMNS": "200"})
    assert made.exit_code == 0, made.output
    card = data_card("clinic", tmp_path / "clinic/data/cards")
    assert (card.reader.width, card.classes, card.records.at_most) == (4, ("no", "yes"), 20000)
    assert made.output.count("age has been entered") == made.output.count("returned has been entered") == 1
    assert made.output.count("A model needs a column that is not ignored") == 2
    assert "classes is none of these; enter one of class, number, count." in made.output
    kinds = "numeric, categorical, ordered, day, text, ignored"
    assert f"numbers is none of these; enter one of {kinds}." in made.output
    assert made.output.count("bounds are LOW,HIGH") == 3 and made.output.count("Enter at least 2") == 2


def answered(monkeypatch: pytest.MonkeyPatch, arguments: list[str], *typed: str) -> Result:
    """What `init` does at a terminal where this is typed."""
    monkeypatch.setattr("flows.cli.projects.sys", SimpleNamespace(stdin=SimpleNamespace(isatty=lambda: True)))
    lines = "".join(f"{line}\n" for line in typed)
    return CliRunner().invoke(app, ["init", "clinic", *arguments], input=lines, env={"COLUMNS": "200"})


def test_the_columns_of_a_file_are_asked_about_by_name_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Semicolons, categories with commas, steps back, a class too few, a person who is a feature, a bound of none."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.csv").write_text("\ufeffwho; age;town;back\n", encoding="utf-8")
    label = ["gone", "town", "<", "back", "", "no", "no,no", '"no, never",yes']
    ignored = ["ignored", "<", "<", "no,yes", "ignored"]  # two steps back, from the age to the classes
    columns = ["numeric", "0,100", "categorical", 'Ulm,"Bonn, am Rhein","', 'Ulm, "Bonn, am Rhein"']
    made = answered(
        monkeypatch, ["--file", "t.csv"], *label, *ignored, *columns, "0", "500", "age", "who", "3"
    )
    assert made.exit_code == 0, made.output
    card = data_card("clinic", tmp_path / "clinic/data/cards")
    assert (card.classes, card.records.at_most, card.reader.separator) == (("no", "yes"), 500, ";")
    assert [(one.name, one.kind) for one in card.reader.columns] == [
        ("who", "ignored"),
        ("age", "numeric"),
        ("town", "categorical"),
        ("back", "label"),
    ]
    assert card.reader.columns[2].categories == ("Ulm", "Bonn, am Rhein")
    assert card.person is not None and (card.person.column, card.person.per_person) == ("who", 3)
    assert (
        "'gone' is none of these columns; enter one of who, age, town, back." in made.output
        and "age is a feature or predicted" in made.output
    )


def test_columns_without_a_name_of_their_own_are_not_asked_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of the index that pandas writes; no card could name them, after all the questions."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.csv").write_text(",age,x,back,x\n0,50,1,no,2\n1,51,1,yes,2\n")
    made = answered(monkeypatch, ["--file", "t.csv"], "back", "class", "no,yes", "numeric", "0,100", "50", "")
    assert made.exit_code == 0 and "left out: '', 'x'." in made.output, made.output
    card = data_card("clinic", tmp_path / "clinic/data/cards")
    assert [column.name for column in card.reader.columns] == ["age", "back"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"5.5,3,no\n6,4,yes\n", "holds numbers, not names of columns"),
        (b"Report of 2024\nage,back\n5,no\n", "names a single column"),
        ("age,back\n5,no\n".encode("utf-16"), "is UTF-16; save the table as UTF-8"),
    ],
)
def test_a_first_line_that_names_no_columns_is_refused_before_a_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.csv").write_bytes(content)
    refused = answered(monkeypatch, ["--file", "t.csv"])
    assert refused.exit_code == 2 and words in refused.stderr and "5.5" not in refused.output


def test_names_that_a_program_counted_are_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As pandas writes an array, whose columns have none."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.csv").write_text("0,1,2,back\n5.5,3,1,no\n6,4,2,yes\n")
    made = answered(
        monkeypatch, ["--file", "t.csv"], "back", "class", "no,yes", *("numeric", "0,9") * 3, "50", ""
    )
    assert made.exit_code == 0, made.output
    columns = data_card("clinic", tmp_path / "clinic/data/cards").reader.columns
    assert [column.name for column in columns] == ["0", "1", "2", "back"]


def test_a_header_in_another_encoding_is_read_and_declared(
    schema: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.csv").write_bytes("größe;back\n1,5;no\n".encode("latin-1"))
    made = answered(monkeypatch, ["--file", "t.csv"], "back", "class", "no,yes", "numeric", "0,9", "50", "")
    assert made.exit_code == 0 and "The file has the columns größe, back." in made.output, made.output
    reader = data_card("clinic", tmp_path / "clinic/data/cards").reader
    assert (reader.encoding, reader.separator, reader.columns[0].name) == ("cp1252", ";", "größe")


def test_an_interview_that_ends_early_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By Ctrl-D, and where the project cannot be made. Answers to other questions are not used."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.csv").write_text("age,back\n")
    (tmp_path / "other.csv").write_text("height,back\n")
    kept, options = tmp_path / "clinic.answers.json", ["--file", "t.csv"]
    ended = answered(monkeypatch, options, "back", "class", "no,yes", "numeric")
    assert ended.exit_code == 1 and f"answers are kept in {kept}; the same command goes on" in ended.stderr
    make = new_project.make

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(new_project, "make", fail)
    refused = answered(monkeypatch, options, "0,9", "50", "")
    assert refused.exit_code == 2 and "its classes" not in refused.output
    monkeypatch.setattr(new_project, "make", make)
    other = answered(monkeypatch, ["--file", "other.csv"])  # its second column has another name
    assert other.exit_code == 1 and "height is one of" in other.output and "50" not in kept.read_text()
    made = answered(monkeypatch, options, "numeric", "0,9", "50", "")
    assert made.exit_code == 0 and not kept.exists(), made.output
    card = data_card("clinic", tmp_path / "clinic/data/cards")
    assert (card.classes, card.records.at_most) == (("no", "yes"), 50)


def test_answers_that_make_no_card_are_asked_again_from_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.csv").write_text("age,back\n")
    checked, refused = new_project.check_declared, ["the card is refused"]

    def check(declared: new_project.Declared) -> None:
        if refused:
            raise ParamsRefusedError(refused.pop())
        checked(declared)

    monkeypatch.setattr(new_project, "check_declared", check)
    made = answered(
        monkeypatch, ["--file", "t.csv"], "back", "class", "no,yes", "numeric", "0,9", "50", "", ""
    )
    assert made.exit_code == 0 and made.output.count("the card is refused") == 1, made.output
    assert made.output.count("column of the person's id") == 2 and made.output.count("upper bound") == 1


def test_an_error_that_no_answer_causes_is_said_once_and_leaves_the_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    kept = tmp_path / "clinic.answers.json"
    kept.write_text(answers := json.dumps([["column to predict", "back"], ["  back is one of", "class"]]))
    refused = call("init", "clinic")
    assert refused.exit_code == 2 and refused.output.count("there is no terminal to ask") == 1
    assert kept.read_text() == answers


def test_a_number_is_predicted_from_days_and_ordered_categories_as_a_schema_declares_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t.csv").write_text("seen,pain,job,age,cost\n")
    days = ["day", "2020-01-31", "2020-02-30,2021-01-01", "1800-01-01,2020-01-01", "31.1.2020,1.2.2020"]
    days += ["2021-12-31,2019-01-01", "2019-01-01, 2021-12-31"]
    typed = ["cost", "number", "500,0", "0,500", *days, "ordered", "none,mild,bad", "text", "", "18,100"]
    asked = answered(monkeypatch, ["--file", "t.csv", "--at-most", "900"], *typed, "")
    assert asked.exit_code == 0, asked.output
    assert asked.output.count("as 2020-01-01,2024-12-31, not '") == 5
    card = data_card("clinic", tmp_path / "clinic/data/cards")
    assert card.target == Number(bounds=(0.0, 500.0)) and isinstance(card.reader, Csv)
    seen, pain, job, age, cost = card.reader.columns
    assert isinstance(job, Hashed) and job.cells == 64
    assert isinstance(seen, Timestamp) and seen.bounds == ("2019-01-01", "2021-12-31")
    assert isinstance(pain, Categorical) and pain.ordered and pain.categories == ("none", "mild", "bad")
    assert isinstance(age, Numeric) and (age.bounds, age.missing, cost.kind) == ((18, 100), 59.0, "label")
    fields = [
        {"name": "seen", "type": "date", "constraints": {"minimum": "2019-01-01", "maximum": "2021-12-31"}},
        {"name": "pain", "categoriesOrdered": True, "constraints": {"enum": ["none", "mild", "bad"]}},
        {"name": "job", "type": "string", "hashed": 64},
        {"name": "age", "constraints": {"minimum": 18, "maximum": 100}},
        {"name": "cost", "constraints": {"minimum": 0, "maximum": 500}},
    ]
    Path("schema.json").write_text(json.dumps({"fields": fields}))
    Path("clinic").rename("asked")
    options = ["--file", "t.csv", "--at-most", "900", "--from", "schema.json", "--label", "cost"]
    assert answered(monkeypatch, options, "").exit_code == 0
    for path in ("data/cards/clinic.yaml", "params.yaml"):
        assert Path("asked", path).read_text() == Path("clinic", path).read_text()


@pytest.mark.parametrize(
    ("options", "typed", "target"),
    [
        ([], ["visits", "count", "0", "1.5", "60", "0,9"], Count(bounds=(0.0, 60.0), counts=True)),
        (["--label", "visits"], ["Number", "0,60", "0,9"], Number(bounds=(0.0, 60.0))),
        (["--counts"], ["visits", "60", "0,9"], Count(bounds=(0.0, 60.0), counts=True)),
        (["--quantile", "0.9"], ["visits", "1,60", "0,9"], Quantile(bounds=(1.0, 60.0), quantile=0.9)),
        (["--label", "visits,ill"], [], Labels(labels=("visits", "ill"))),
    ],
    ids=["a count", "a label by an option", "a count by an option", "a quantile", "several labels"],
)
def test_what_options_say_of_the_target_is_not_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], typed: list[str], target: Target
) -> None:
    monkeypatch.chdir(tmp_path)
    header = "age,ill,visits" if target.kind == "labels" else "age,visits"
    Path("t.csv").write_text(f"{header}\n")
    *label, bounds = typed or ["0,9"]
    options = ["--file", "t.csv", "--at-most", "900", *options]
    made = answered(monkeypatch, options, *label, "numeric", bounds, "")
    assert made.exit_code == 0, made.output
    assert data_card("clinic", tmp_path / "clinic/data/cards").target == target


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--label", "cost"], "no column 'cost' that could be predicted; name one of age, visits by --label"),
        (["--label", "visits,visits"], "--label names 'visits' twice; name each column once"),
        (
            ["--label", "age", "--person", "age"],
            "no column 'age' that could be predicted; name one of visits",
        ),
        (["--counts", "--quantile", "0.9"], "--counts is for the mean of counts"),
        (["--quantile", "9"], "--quantile is 9; give a number between 0 and 1"),
        (["--label", "age,visits", "--counts"], "--counts is for a number to predict"),
    ],
)
def test_options_that_do_not_fit_are_refused_before_a_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t.csv").write_text("age,visits\n")
    refused = answered(monkeypatch, ["--file", "t.csv", *options])
    assert refused.exit_code == 2 and words in " ".join(refused.output.split())
    assert "column to predict" not in refused.output and " is one of " not in refused.output


@pytest.mark.parametrize("has_file", [True, False])
def test_the_person_of_an_option_is_neither_predicted_nor_a_feature(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_file: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t.csv").write_text("id,age,back\n")
    options = ["--person", "id", "--at-most", "900"]
    if has_file:
        made = answered(monkeypatch, [*options, "--file", "t.csv"], "id", "back", "", "no,yes", "", "0,9")
        assert "'id' is none of these columns; enter one of age, back." in made.output
    else:
        made = answered(monkeypatch, options, "id", "back", "", "no,yes", "id", "age", "", "0,9", "")
        assert made.output.count("id has been entered; enter another column.") == 2
    assert made.exit_code == 0, made.output
    columns = data_card("clinic", tmp_path / "clinic/data/cards").reader.columns
    assert {(one.name, one.kind) for one in columns} == {
        ("id", "ignored"),
        ("age", "numeric"),
        ("back", "label"),
    }


def test_no_question_and_no_default_depends_on_the_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = "".join(f"2020-01-{day:02d},{day}.5,{day % 2}\n" for day in range(1, 31))
    told = []
    for name, body in (("few", ""), ("many", rows)):
        Path("t.csv").write_text(f"seen,age,back\n{body}")
        typed = ["back", "", "0,1", "day", "2020-01-01,2021-01-01", "", "0,9", "50", ""]
        made = answered(monkeypatch, ["--file", "t.csv"], *typed)
        assert made.exit_code == 0, made.output
        card = Path("clinic/data/cards/clinic.yaml").read_text()
        told.append(
            (made.output.partition("column of the person's id")[0], re.sub(r"keyed_sha256: \w+", "", card))
        )
        Path("clinic").rename(name)
    assert told[0] == told[1]


@pytest.mark.parametrize("is_asked", [False, True])
def test_a_person_with_several_rows_is_declared_or_asked_about(
    schema: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_asked: bool
) -> None:
    fields = (
        [{"name": "patient_id"}, *FIELDS]
        if not is_asked
        else [{"name": "patient_id", "ignore": True}, *FIELDS]
    )
    (tmp_path / "schema.json").write_text(json.dumps({"fields": fields}))
    options = ["--from", schema, "--at-most", "900"]
    if is_asked:
        made = answered(monkeypatch, options, "insurance", "patient_id", "4")
    else:
        made = call("init", "clinic", *options, "--person", "patient_id", "--per-person", "4")
    assert made.exit_code == 0, made.output
    card = data_card("clinic", tmp_path / "clinic/data/cards")
    assert card.person is not None and (card.person.column, card.person.per_person) == ("patient_id", 4)
    assert "a person of its own" not in made.output


def test_a_row_is_a_person_unless_somebody_says_otherwise_and_the_plan_asks(
    schema: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "schema.json").write_text(
        json.dumps({"fields": [{"name": "patient_id", "ignore": True}, *FIELDS]})
    )
    (tmp_path / "t.csv").write_text("patient_id,age,distance_km,insurance,reason,returned\n")
    options = ["--from", schema, "--file", "t.csv", "--at-most", "900"]
    made = call("init", "clinic", *options)
    assert "each row is a person of its own" in made.stdout and "--person COLUMN" in made.stdout
    visits = call("init", "visits", *options, "--unit", "one visit")
    assert visits.exit_code == 0 and "a person of its own" not in visits.stdout
    for name, is_asked in (("clinic", True), ("visits", False)):
        monkeypatch.chdir(tmp_path / name)
        plan = call("plan")
        assert plan.exit_code == 0 and ("may a person have several rows?" in plan.stdout) == is_asked
    monkeypatch.chdir(tmp_path)
    for wrong, words in (
        (["--per-person", "3"], "--per-person needs the column of the person's id"),
        (["--person", "nobody"], "has no field 'nobody'"),
        (["--person", "returned"], "has no field 'returned' beside what is predicted"),
    ):
        refused = call("init", "other", *options, *wrong)
        assert refused.exit_code == 2 and words in refused.stderr


def test_texts_of_people_with_several_rows_are_declared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.csv").write_text("user;text;label\n")
    options = ["--texts", "t.csv", "--classes", "no,yes", "--at-most", "900", "--person", "user"]
    made = call("init", "clinic", *options)
    assert made.exit_code == 0, made.output
    card = data_card("clinic", tmp_path / "clinic/data/cards")
    assert card.person is not None and (card.person.column, card.reader.separator) == ("user", ";")


def test_held_out_people_are_private_unless_a_reason_is_given(schema: str, tmp_path: Path) -> None:
    made = call("init", "clinic", "--from", schema, "--at-most", "900")
    assert made.exit_code == 0, made.output
    assert "as private as the rest: one noised histogram" in " ".join(made.stdout.split())
    declared = data_card("clinic", tmp_path / "clinic/data/cards")
    assert (declared.holdout, declared.holdout_why) == ("private", None)
    why = ("--why", "the test patients are invented")
    made = call("init", "other", "--from", schema, "--at-most", "900", "--holdout", "public", *why)
    assert made.exit_code == 0, made.output
    declared = data_card("other", tmp_path / "other/data/cards")
    assert (declared.holdout, declared.holdout_why) == ("public", "the test patients are invented")
    for odd in (("--holdout", "public"), why):
        refused = call("init", "third", "--from", schema, "--at-most", "900", *odd)
        assert refused.exit_code != 0
        assert "give both --holdout public and --why" in " ".join(refused.output.split())


def test_a_file_of_tabs_is_read_by_them(schema: str, tmp_path: Path) -> None:
    (tmp_path / "t.tsv").write_text("age\tdistance_km\tinsurance\treason\treturned\n")
    made = call("init", "clinic", "--from", schema, "--at-most", "900", "--file", "t.tsv")
    assert made.exit_code == 0, made.output
    reader = data_card("clinic", tmp_path / "clinic/data/cards").reader
    assert isinstance(reader, Csv) and reader.separator == "\t"


def test_a_schema_says_how_missing_values_and_decimals_are_written(schema: str, tmp_path: Path) -> None:
    document = json.loads(Path(schema).read_text())
    document["fields"][0] |= {"type": "number", "decimalChar": ","}
    Path(schema).write_text(json.dumps(document | {"missingValues": ["NA", " - "]}))
    made = call("init", "clinic", "--from", schema, "--at-most", "900")
    assert made.exit_code == 0, made.output
    reader = data_card("clinic", tmp_path / "clinic/data/cards").reader
    assert isinstance(reader, Csv) and (reader.missing, reader.decimal) == (("", "NA", "-"), ",")


def test_missing_values_in_their_usual_spellings_are_read_unless_a_schema_lists_its_own(
    schema: str, tmp_path: Path
) -> None:
    rows = [f"30,{written},public,pain,no" for written in ("NA", "n/a", "NULL", "None", "?", "-", "nan", "")]
    header = ",".join(field["name"] for field in FIELDS)
    Path("t.csv").write_text("\n".join([header, *rows, "31,2,none,pain,yes", ""]))
    made = call("init", "mine", "--from", schema, "--file", "t.csv", "--at-most", "400")
    assert made.exit_code == 0 and "NA, ?, - and the like" in made.stdout, made.output
    assert "column distance_km: missing: most of the records" in made.stdout and "refused" not in made.stdout
    document = json.loads(Path(schema).read_text())
    Path(schema).write_text(json.dumps(document | {"missingValues": [""]}))
    strict = call("init", "strict", "--from", schema, "--file", "t.csv", "--at-most", "400")
    assert "holds something that is not a number" in strict.stdout and "and the like" not in strict.stdout


def test_missing_values_of_each_field_are_read_where_they_are_the_same(schema: str, tmp_path: Path) -> None:
    document = json.loads(Path(schema).read_text())
    for field in document["fields"]:
        field["missingValues"] = ["NA", {"value": "-99", "label": "not asked"}]
    Path(schema).write_text(json.dumps(document))
    made = call("init", "clinic", "--from", schema, "--at-most", "900")
    assert made.exit_code == 0, made.output
    reader = data_card("clinic", tmp_path / "clinic/data/cards").reader
    assert isinstance(reader, Csv) and reader.missing == ("", "NA", "-99")
    document["fields"][0]["missingValues"] = ["NA"]
    Path(schema).write_text(json.dumps(document))
    refused = call("init", "other", "--from", schema, "--at-most", "900")
    assert refused.exit_code == 2 and "missingValues differ between fields" in " ".join(
        refused.output.split()
    )


def test_numbers_with_points_and_with_commas_are_refused_by_their_fields(schema: str) -> None:
    document = json.loads(Path(schema).read_text())
    document["fields"][1] |= {"type": "number", "decimalChar": ","}
    document["fields"][0] |= {"type": "number"}
    Path(schema).write_text(json.dumps(document))
    refused = call("init", "clinic", "--from", schema, "--at-most", "900")
    assert refused.exit_code == 2 and "'age' and 'distance_km' have different" in " ".join(
        refused.output.split()
    )


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"missingValues": "NA"}, "must be a list of texts"),
        ({"decimalChar": "'"}, "'age' has another decimalChar than a point or a comma"),
        ({"decimalChar": [","]}, "'age' has another decimalChar than a point or a comma"),
        ({"groupChar": ","}, "'age' has a groupChar, and numbers are read without a mark between thousands"),
        ({"bareNumber": False}, "'age' has a bareNumber, and numbers are read without a unit"),
        ({"type": "date", "format": "%d.%m.%Y"}, "'age' has a format, and days are read as 2020-01-31"),
        ({"type": "date", "format": "any"}, "'age' has a format, and days are read as 2020-01-31"),
        (
            {"type": "boolean", "trueValues": ["yes", "y"]},
            "must have one of trueValues and one of falseValues",
        ),
    ],
)
def test_spellings_that_no_card_declares_are_refused(schema: str, keys: dict[str, str], words: str) -> None:
    document = json.loads(Path(schema).read_text()) | keys
    document["fields"][0] |= {"type": "number", **keys}
    Path(schema).write_text(json.dumps(document))
    made = call("init", "clinic", "--from", schema, "--at-most", "900")
    assert made.exit_code == 2 and not Path("clinic").exists() and words in " ".join(made.output.split())


def test_a_field_of_type_boolean_is_true_or_false(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fields: list[dict[str, object]] = [{"name": name, "type": "boolean"} for name in ("smokes", "returned")]
    for folder, classes in (("clinic", ("true", "false")), ("other", ("yes", "no"))):
        Path("schema.json").write_text(json.dumps({"fields": fields}))
        made = call("init", folder, "--from", "schema.json", "--at-most", "900")
        assert made.exit_code == 0, made.output
        card = data_card(folder, tmp_path / folder / "data/cards")
        assert (card.reader.width, card.classes) == (3, classes)
        fields[1] |= {"trueValues": ["yes"], "falseValues": ["no"]}


def test_numbers_that_nobody_said_are_told_and_those_that_were_said_are_not(schema: str) -> None:
    told = " ".join(call("init", "clinic", "--from", schema, "--at-most", "20000").stdout.split())
    assert "all runs together may spend epsilon 10 and delta 0.0001" in told
    assert "what is protected: one person" in told and "a fifth of the records is held out" in told
    assert "then has cells of its own: age" in told and "epsilon 1, delta 1e-06" in told
    said = ("--cap", "4", "--unit", "one visit")
    told = " ".join(call("init", "other", "--from", schema, "--at-most", "20000", *said).stdout.split())
    assert "may spend epsilon" not in told and "protected" not in told and "may spend delta 0.0001" in told
    card = " ".join(Path("other/data/cards/other.yaml").read_text().split())
    assert "cap: epsilon: 4.0 delta: 0.0001 " in card


def test_of_a_wide_table_the_first_defaults_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    wide = [{"name": f"x{place}", "constraints": {"minimum": 0, "maximum": 1}} for place in range(500)]
    Path("schema.json").write_text(json.dumps({"fields": [*wide, FIELDS[-1]]}))
    told = call("init", "wide", "--from", "schema.json", "--at-most", "900").stdout
    assert "x9, and 490 more" in told and "x10" not in told


def test_tables_are_encoded_as_cells_for_the_additive_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    day = {"name": "seen", "type": "date", "constraints": {"minimum": "2019-01-01", "maximum": "2021-12-31"}}
    pain = {"name": "pain", "categoriesOrdered": True, "constraints": {"enum": ["none", "mild", "bad"]}}
    Path("schema.json").write_text(json.dumps({"fields": [day, pain, *FIELDS]}))
    made = call("init", "clinic", "--from", "schema.json", "--at-most", "400000")
    assert made.exit_code == 0, made.output
    card = data_card("clinic", tmp_path / "clinic/data/cards")
    assert isinstance(card.reader, Csv) and card.reader.cells == CellSettings(
        trees=128, tree_share=0.25, constant_share=0.02
    )
    assert [column.kind for column in card.reader.columns][:3] == ["timestamp", "categorical", "numeric"]
    assert isinstance(card.reader.columns[1], Categorical) and card.reader.columns[1].ordered
    params = YAML(typ="safe", pure=True).load(tmp_path / "clinic/params.yaml")
    assert params["model"]["name"] == "additive"
    assert params["algorithm"]["sampling_rate"] == pytest.approx(8192 / 400_000, rel=0.05)
    assert params["algorithm"]["update"]["noise_limit"] == 0.7
    assert params["algorithm"]["clip_norm"] == 0.8  # two classes
    assert params["algorithm"]["update"]["momentum"] == 0.97  # steps go far, as there are many records
    assert params["algorithm"]["update"]["learning_rate"] == pytest.approx(1.97 / 0.25, rel=0.01)


def test_a_column_of_one_value_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    alone = {"name": "country", "constraints": {"enum": ["Italy"]}}
    Path("schema.json").write_text(json.dumps({"fields": [alone, *FIELDS]}))
    refused = call("init", "clinic", "--from", "schema.json", "--at-most", "900")
    assert refused.exit_code == 2 and "'country' has one value" in refused.stderr
    assert refused.stderr.count("\n") == 1 and not Path("clinic").exists()


def test_the_schema_of_the_tutorial_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (PROJECT / "docs/tutorials/own-table.md").read_text()
    (text,) = re.findall(r"```json\n(.*?)```", page, flags=re.DOTALL)
    (tmp_path / "schema.json").write_text(text)
    monkeypatch.chdir(tmp_path)
    made = call("init", "clinic", "--from", "schema.json", "--at-most", "20000")
    assert made.exit_code == 0, made.output
    card = data_card("clinic", tmp_path / "clinic/data/cards")
    assert (card.reader.width, card.classes) == (5, ("no", "yes"))


@pytest.mark.parametrize(
    ("fields", "arguments", "words"),
    [
        (FIELDS, (), "give --at-most N"),
        (FIELDS, ("--at-most", "9", "--label", "weight"), "has no field 'weight'"),
        (FIELDS[:2], ("--at-most", "9"), "has no field with an enum"),
        (FIELDS, ("--at-most", "9", "--label", "returned,reason"), "'returned' never does"),
        ([*FIELDS, {"name": "weight"}], ("--at-most", "9", "--label", "weight"), "which is predicted"),
        ([{"name": "age"}, FIELDS[-1]], ("--at-most", "9"), "nothing bounds the field 'age'"),
        ("none", ("--at-most", "9"), "is no table schema"),
        *[
            ([{"name": "age", "constraints": limits}, FIELDS[-1]], ("--at-most", "9"), words)
            for limits, words in [
                (
                    {"minimum": "2020-01-01", "maximum": "2021-01-01"},
                    "of the field 'age' must be finite numbers",
                ),
                ({"minimum": "zero", "maximum": 9}, "of the field 'age' must be finite numbers"),
                (
                    {"minimum": 9, "maximum": 9},
                    "of the field 'age' must be finite numbers, the minimum the smaller",
                ),
                ({"minimum": False, "maximum": True}, "of the field 'age' must be finite numbers"),
                ({"minimum": [0], "maximum": 10**400}, "of the field 'age' must be finite numbers"),
                ({"minimum": None, "maximum": 9}, "nothing bounds the field 'age'"),
                ({"enum": "yes"}, "the enum of the field 'age' must be a list"),
                ({"enum": [None, "x"]}, "leave out null"),
                ({"enum": [["x"], "y"]}, "the enum of the field 'age' must be a list"),
                ({"enum": ["x", ""]}, "the enum of the field 'age' lists '', and a value is one line"),
                ({"enum": ["x", " y"]}, "the enum of the field 'age' lists ' y', and a value is one line"),
                (
                    {"enum": ["x", "y\nz"]},
                    "the enum of the field 'age' lists 'y\\nz', and a value is one line",
                ),
            ]
        ],
        (
            [FIELDS[0], {"name": "y", "constraints": {"enum": "yes"}}],
            ("--at-most", "9"),
            "enum of the field 'y'",
        ),
        (
            [FIELDS[-1], {"name": "day", "constraints": {"minimum": "2020-01-01", "maximum": "2021-01-01"}}],
            ("--at-most", "9", "--label", "day"),
            "of the field 'day' must be finite numbers",
        ),
        (FIELDS, ("--at-most", "9", "--from", "missing.json"), "no file missing.json"),
        (FIELDS, ("--at-most", "9", "--file", "missing.csv"), "there is no missing.csv"),
    ],
)
def test_what_is_not_declared_is_refused(
    schema: str, tmp_path: Path, fields: object, arguments: tuple[str, ...], words: str
) -> None:
    (tmp_path / schema).write_text(json.dumps({"fields": fields}))
    refused = call("init", "clinic", "--from", schema, *arguments)
    assert refused.exit_code == 2 and words in refused.stderr, refused.output
    assert not (tmp_path / "clinic").exists()


def test_true_and_false_are_spelled_as_a_table_spells_them_and_dates_can_be_ignored(
    schema: str, tmp_path: Path
) -> None:
    fields = [
        {"name": "day", "constraints": {"minimum": "2020-01-01", "maximum": "2021-01-01"}, "ignore": True},
        {"name": "smokes", "constraints": {"enum": [True, False]}},
        {"name": "rooms", "type": "number", "constraints": {"enum": [1.0, 2, 3.0]}},
        {"name": "dose", "type": "number", "constraints": {"enum": [0.5, 1, 2.5]}},
        {"name": "ill", "constraints": {"enum": [False, True]}},
    ]
    (tmp_path / schema).write_text(json.dumps({"fields": fields}))
    made = call("init", "clinic", "--from", schema, "--at-most", "9")
    assert made.exit_code == 0, made.output
    card = data_card("clinic", tmp_path / "clinic/data/cards")
    assert isinstance(card.reader, Csv) and card.classes == ("false", "true")
    day, *others, _ = card.reader.columns
    spelled = [column.categories for column in others if isinstance(column, Categorical)]
    assert spelled == [("true", "false"), ("1", "2", "3"), ("0.5", "1", "2.5")]
    assert day.kind == "ignored"


@pytest.mark.parametrize(
    ("folder", "options", "words"),
    [
        ("photos/pets", ("--images", "photos"), "photos/pets would lie in photos"),
        ("photos/cat/more", ("--images", "linked"), "would lie in linked"),
        ("photos", ("--images", "."), "photos would lie in ., which is copied into it"),
        ("pets", ("--file", "photos"), "photos is a folder, and --file takes a table"),
        ("photos/pets", ("--file", "photos"), "photos is a folder, and --file takes a table"),
    ],
)
def test_a_folder_is_not_copied_into_itself_or_as_a_table(
    schema: str, tmp_path: Path, folder: str, options: tuple[str, str], words: str
) -> None:
    for name in ("cat", "dog"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        (tmp_path / "photos" / name / "1.png").write_bytes(b"one")
    (tmp_path / "linked").symlink_to("photos")
    kind = ("--from", schema) if "--file" in options else ("--classes", "cat,dog")
    before = set(tmp_path.rglob("*"))
    refused = call("init", folder, *options, *kind, "--at-most", "200")
    assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1) and words in refused.stderr
    assert set(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.EACCES, "clinic/data/cards: permission denied; use another place"),
        (errno.EROFS, "clinic/data/cards: read-only file system; use another place"),
        (errno.ENOSPC, "the disk is full; make room"),
    ],
)
def test_a_place_that_cannot_be_written_is_refused_in_a_sentence(
    number: int, words: str, schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(path: Path, *_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(Path, "mkdir", forbidden)
    refused = call("init", "clinic", "--from", schema, "--at-most", "9")
    assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1) and words in refused.stderr


@pytest.mark.parametrize(("name", "target"), [("up", ".."), ("nothing", "missing")])
def test_links_that_cannot_be_followed_are_refused(tmp_path: Path, name: str, target: str) -> None:
    (tmp_path / "photos/cat").mkdir(parents=True)
    (link := tmp_path / "photos/cat" / name).symlink_to(target)
    folder = tmp_path / "pets"
    refused = call(
        "init", str(folder), "--images", f"{tmp_path}/photos", "--classes", "cat,dog", "--at-most", "9"
    )
    assert refused.exit_code == 2 and f"refused: {link} " in refused.stderr and "remove" in refused.stderr
    assert not folder.exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--unit", ""], "no data card can be made of what was declared (key unit: String should"),
        (["--cap", "nan"], "declared (key cap.epsilon: Input should be a finite number); change that."),
        (
            ["--classes", "no,yes"],
            "--classes is not for a table, which takes --from, --label, --counts, --quantile; leave it out.",
        ),
        (["--images", "photos"], "--from is not for images"),
    ],
)
def test_what_does_not_fit_is_refused_in_the_words_of_init(
    schema: str, options: list[str], words: str
) -> None:
    refused = call("init", "clinic", "--from", schema, "--at-most", "9", *options)
    assert refused.exit_code == 2 and words in refused.stderr, refused.stderr
    assert not Path("clinic").exists()


def test_the_templates_are_those_of_this_checkout() -> None:
    assert not list(TEMPLATES.rglob("dvc.yaml"))  # which DVC would take for stages of this project
    assert (TEMPLATES / "params.yaml").read_text() == (PROJECT / "params.yaml").read_text()
    yaml = YAML(typ="safe", pure=True)
    ours, theirs = yaml.load(PROJECT / "dvc.yaml"), yaml.load(TEMPLATES / "stages.yaml")
    code = re.compile(r"(algorithms|tasks|data)(/|$)")
    deployed, ours_deployed = (
        {deployment["name"]: deployment for deployment in yaml.load(path)["deployments"]}
        for path in (TEMPLATES / "prefect.yaml", PROJECT / "prefect.yaml")
    )
    assert deployed.keys() == ours_deployed.keys() - {"compare"}
    for name, deployment in deployed.items():
        file = ours_deployed[name].pop("entrypoint")
        entrypoint = deployment.pop("entrypoint")
        module, flow = load_flow_from_entrypoint(entrypoint).fn.__module__, entrypoint.rpartition(".")[2]
        assert (entrypoint, file) == (f"epsilonflow.deployed.{flow}", f"{module.replace('.', '/')}.py:{flow}")
        about = [one.pop("description") for one in (deployment, ours_deployed[name])]
        alone = {"env": {"PYTHONSAFEPATH": "1"}}  # the folder may hold a module such as tasks.py
        assert deployment["work_pool"] == {"name": "local-pool", "job_variables": alone}
        assert all(about) and deployment | {"work_pool": {"name": "local-pool"}} == ours_deployed[name]
    for name, stage in ours["stages"].items():
        stage["deps"] = [dep for dep in stage["deps"] if not code.match(dep)]
        stage["deps"] += ["data/cards"] if name == "prepare" else []
        stage["deps"] += ["requirements.txt"]
    assert theirs == ours


@pytest.mark.parametrize(
    ("options", "kind", "encoder"),
    [
        (["--images", "photos", "--size", "16"], "images", "efficientnet-lite0"),
        (["--texts", "t.csv", "--columns", "title, body", "--label", "mood"], "texts", "wordllama"),
    ],
)
def test_a_project_of_images_or_texts_is_made_for_an_encoder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], kind: str, encoder: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("bad", "good"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for place in range(20):
            (tmp_path / "photos" / name / f"{place}.png").write_bytes(name.encode() * place)
        Image.new("L", (9, 9)).save(tmp_path / "photos" / name / "0.png")
    rows = "".join(f"{place},text,{'good' if place % 2 else 'bad'}\n" for place in range(40))
    (tmp_path / "t.csv").write_text(f"title,body,mood\n{rows}")
    with open_umask():
        made = call("init", "mine", *options, "--classes", "bad,good", "--at-most", "1000")
    assert made.exit_code == 0, made.output
    assert open_to_others(tmp_path / "mine/datasets") == []
    monkeypatch.chdir(tmp_path / "mine")
    card = data_card("mine", tmp_path / "mine/data/cards")
    assert (card.reader.kind, card.classes, card.records.at_most) == (kind, ("bad", "good"), 1000)
    params = YAML(typ="safe").load(tmp_path / "mine/params.yaml")
    assert (params["data"]["transform"], params["data"]["encoder"]["name"]) == ("encoder", encoder)
    checked = call("data", "check", "mine")
    assert checked.exit_code == 0 and "can be read as its card declares" in checked.stdout, checked.output
    monkeypatch.chdir(tmp_path)
    refused = call("init", "other", *options, "--classes", "bad", "--at-most", "1000")
    assert refused.exit_code == 2 and "classes" in refused.stderr
    assert not (tmp_path / "other").exists()  # so that the same command with more classes makes it
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    inside = [f"../{given}" if given in ("photos", "t.csv") else given for given in options]
    assert call("init", ".", *inside, "--classes", "bad", "--at-most", "1000").exit_code == 2
    assert Path.cwd().is_dir() and not list(Path.cwd().iterdir())
    unnamed = call("init", ".", *inside, "--at-most", "1000")
    assert unnamed.exit_code == 2 and "name the classes by --classes" in unnamed.stderr
    both = call("init", ".", *inside, "--file", "../t.csv", "--classes", "bad,good", "--at-most", "1000")
    assert both.exit_code == 2 and "give one of --file, --images and --texts" in both.stderr


@pytest.mark.parametrize(
    ("options", "target"),
    [
        (["--file", "t.csv", "--label", "stars"], {"bounds": (1.0, 5.0)}),
        (["--file", "t.csv", "--label", "good,long"], {"labels": ("good", "long")}),
        (["--texts", "t.csv", "--label", "stars", "--bounds", "1,5"], {"bounds": (1.0, 5.0)}),
        (["--texts", "t.csv", "--label", "good,long"], {"labels": ("good", "long")}),
    ],
)
def test_a_number_or_several_labels_are_predicted_where_that_is_declared(
    schema: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], target: dict[str, Any]
) -> None:
    if "--texts" in options:
        pytest.importorskip("wordllama", exc_type=ImportError)
    else:
        options = ["--from", schema, *options]
    stars = {"name": "stars", "constraints": {"minimum": 1, "maximum": 5}}
    others = [
        {"name": "text", "ignore": True},
        {"name": "good"},
        {"name": "long", "constraints": {"enum": [0, 1]}},
    ]
    others[1] |= {"type": "boolean"} if "good,long" in options else {"constraints": {"enum": [0, 1]}}
    (tmp_path / schema).write_text(json.dumps({"fields": [others[0], stars, *others[1:]]}))
    (tmp_path / "t.csv").write_text("text,stars,good,long\n" + "a film,4,1,0\n" * 40)
    made = call("init", "mine", *options, "--at-most", "5000")
    assert made.exit_code == 0, made.output
    monkeypatch.chdir(tmp_path / "mine")
    known = data_card("mine", tmp_path / "mine/data/cards").label_type
    assert {name: getattr(known, name) for name in target} == target
    plan = call("plan")
    assert plan.exit_code == 0, plan.output


@pytest.mark.parametrize(
    ("options", "target", "label"),
    [
        (["--next-token"], NextToken(next="token"), ()),
        (["--tags", "O,B-WHO,I-WHO"], Tags(tags=("O", "B-WHO", "I-WHO"), outside="O"), "tags"),
        (["--tags", "X,Y", "--label", "kind"], Tags(tags=("X", "Y")), "kind"),
    ],
)
def test_a_project_of_next_tokens_or_tags_is_made_for_a_public_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], target: Target, label: str
) -> None:
    """The folder of the model is named from outside the project, and found from within."""
    monkeypatch.chdir(tmp_path)
    publish(tmp_path / "public", positions=128, causal=options == ["--next-token"])
    rows = [{"text": f"a film {n}", "tags": "O O O"} for n in range(40)]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    many = ["--texts", "t.jsonl", "--at-most", "5000", *options]
    refused = call("init", "mine", *many, "--bounds", "1,5")
    assert refused.exit_code == 2 and "one thing is predicted" in refused.stderr
    made = call("init", "mine", *many, "--encoder", "tokenizer/public")
    assert made.exit_code == 0, made.output
    monkeypatch.chdir(tmp_path / "mine")
    card = data_card("mine", tmp_path / "mine/data/cards")
    assert card.label_type == target and isinstance(card.reader, Texts) and card.reader.label == label
    checked = call("data", "check", "mine")
    assert checked.exit_code == 0 and "can be read as its card declares" in checked.stdout, checked.output
    plan = call("plan")
    assert plan.exit_code == 0, plan.output
    assert "name: huggingface" in Path("params.yaml").read_text()


TEXTS = "mine --texts t.csv --at-most 50"


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("schema.json --from schema.json --at-most 9", "schema.json is a file; name a new folder"),
        ("mine --file missing.csv", "there is no missing.csv"),
        ("mine --file schema.json", "schema.json is no CSV or Parquet file"),
        ("mine --texts films.csv --at-most 9", "there is no films.csv"),
        ("mine --images films.csv --at-most 9", "there is no films.csv"),
        (". --at-most 9", "is not empty"),
        ("mine --at-most 9", "give them by --from schema.json"),
        (f"{TEXTS} --next-token", "name it by --encoder tokenizer/NAME"),
        (f"{TEXTS} --classes good,bad --encoder wordlama", "there is no encoder 'wordlama'; choose"),
        (f"{TEXTS} --label stars --bounds 5,1", "bounds are LOW,HIGH"),
        (f"{TEXTS} --classes a,b --bounds 1,5", "give one of"),
    ],
)
def test_what_cannot_be_made_is_refused_before_columns_are_asked_for(
    schema: str, tmp_path: Path, asked: str, words: str
) -> None:
    (tmp_path / "t.csv").write_text("text,stars\na film,4\n")
    refused = call("init", *asked.split())
    assert refused.exit_code == 2 and words in refused.stderr
    assert not (tmp_path / "mine").exists()


def test_the_number_of_runs_that_are_planned_decides_how_they_add_up(schema: str) -> None:
    assert call("init", "many", "--from", schema, "--at-most", "50", "--runs", "10").exit_code == 0
    card = data_card("many", Path("many/data/cards"))
    assert (card.composition.kind, card.composition.runs, card.composition.order) == ("renyi", 10, None)
    result = call("init", "one", "--from", schema, "--at-most", "50")
    assert data_card("one", Path("one/data/cards")).composition.kind == "basic"
    assert "one run is planned, so the epsilons of runs add up" in result.output


def test_init_says_what_data_check_does_of_the_rows_and_writes_nothing_of_it(
    schema: str, tmp_path: Path, own_home: Path
) -> None:
    """Bounds without values, and a copy of the label; an enum of one value is refused before a row is read."""
    fields = [*FIELDS[:1], {"name": "seen", "constraints": {"enum": ["no", "yes"]}}, FIELDS[-1]]
    (tmp_path / "schema.json").write_text(json.dumps({"fields": fields}))
    rows = [f"{200 + row},{('no', 'yes')[row % 2]},{('no', 'yes')[row % 2]}" for row in range(40)]
    (tmp_path / "table.csv").write_text("\n".join(["age,seen,returned", *rows]) + "\n")
    made = call("init", "clinic", "--from", schema, "--file", "table.csv", "--at-most", "50")
    told = " ".join(made.stdout.split())
    assert made.exit_code == 0, made.output
    assert "look at this: column age: none of its values lies between its bounds, 18 and 100" in told
    assert "look at this: column seen: it says the label 'returned' of nearly every record" in told
    written = [path.read_text() for path in (tmp_path / "clinic").rglob("*.yaml")]
    assert written and not any("none of its values" in text or "nearly every" in text for text in written)
    fields[1]["constraints"] = {"enum": ["no"]}
    (tmp_path / "schema.json").write_text(json.dumps({"fields": fields}))
    refused = call("init", "other", "--from", schema, "--file", "table.csv", "--at-most", "50")
    assert (
        refused.exit_code == 2 and "'seen' has one value, of which a model learns nothing" in refused.output
    )

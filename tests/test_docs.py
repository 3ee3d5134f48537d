"""README and documentation say what the code does: commands exist, examples run, links lead somewhere."""

import ast
import importlib.util
import json
import os
import re
import shlex
import shutil
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from itertools import pairwise
from pathlib import Path
from textwrap import dedent
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import typer
from pydantic import TypeAdapter
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from typer.testing import CliRunner

from algorithms.methods import CATALOGUE
from algorithms.models.libraries import imported_library
from algorithms.privacy.card import verify_card
from data.card import DataCard, data_card
from data.formats import Format
from data.readers.rows import RowReader
from flows.cli.main import app
from tasks.calibrate import plan_for
from tasks.config import params
from tasks.prepare import prepare
from tasks.retraining import RECIPE, Retraining
from tasks.retraining import load as load_retraining
from tasks.tuning.settings import Tuning
from tests.support.checkout import PROJECT, Checkout, new_checkout
from tests.support.one_process import stay_in_this_process
from tests.support.quick_work import quick_work as quick_work
from tests.support.source_texts import text_in

PAGES = [PROJECT / name for name in ("README.md", "CONTRIBUTING.md", "examples/own_data/README.md")]
PAGES += sorted((PROJECT / "docs").rglob("*.md"))
PAGES += sorted((PROJECT / "comparisons" / "results").glob("*.md"))
PAGES += sorted((PROJECT / "benchmarks" / "results").glob("*.md"))
LINK = re.compile(r"\]\(([^)#\s]+)(#[^)]*)?\)")


def commands() -> dict[str, set[tuple[str, bool]]]:
    """By page every command of ours, and whether it is in a block of code, to be typed as it is.

    Others are in backquotes, where a name and options may be mentioned alone.
    """
    found = defaultdict[str, set[tuple[str, bool]]](set)
    for page in PAGES:
        text = page.read_text()
        typed = [line.strip() for line in text.splitlines() if line.startswith("    epsilonflow ")]
        typed += re.findall(r"&& (epsilonflow [^\n`]+)", text)
        mentioned = re.findall(r"`(epsilonflow [^`\n]+)`", text)
        name = page.relative_to(PROJECT).as_posix()
        for is_typed, lines in ((True, typed), (False, mentioned)):
            for line in lines:
                found[name].add((line, is_typed))
    return found


def arguments_of(command: Any, words: list[str], line: str) -> list[str]:
    """What is typed as arguments: neither options nor their values; asserts that all options exist."""
    options = {name: parameter for parameter in command.params for name in parameter.opts}
    rest, values = list(words), []
    while rest:
        word, _, value = rest.pop(0).partition("=")
        if not word.startswith("--"):
            values.append(word)
            continue
        assert word in options or word in ("--help", "--install-completion"), line
        option = options.get(word)
        if option is not None and not option.is_flag and not value:
            del rest[:1]  # its value; a page may mention an option without one
    return values


@cache
def group() -> Any:
    """All commands, of which each takes a moment to make."""
    return typer.main.get_command(app)


@pytest.mark.parametrize(("page", "lines"), sorted(commands().items()))
def test_commands_that_are_written_down_exist(page: str, lines: set[tuple[str, bool]]) -> None:
    for line, is_typed in sorted(lines):
        check_command(line, is_typed=is_typed)


def check_command(line: str, *, is_typed: bool) -> None:
    """With its options, and where it is typed, with its arguments; nothing is run."""
    words = shlex.split(line.split("#")[0].split("&&")[0])[1:]
    command = group()
    while words and getattr(command, "commands", None):
        assert words[0] in command.commands or words[0].startswith("--"), line
        if words[0].startswith("--"):
            break
        command = command.commands[words.pop(0)]
    values = arguments_of(command, words, line)
    if not getattr(command, "commands", None) and "..." not in line and (is_typed or values):
        required = [one for one in command.params if one.param_type_name == "argument" and one.required]
        assert len(values) >= len(required), line


def test_the_line_below_a_tables_head_has_as_many_cells() -> None:
    """Otherwise Markdown shows no table."""
    broken = []
    for page in PAGES:
        for head, below in pairwise(page.read_text().splitlines()):
            cells = re.sub(r"`[^`]*`|\\\|", "", head)
            if re.fullmatch(r"\|( :?-+:? \|)+", below) and cells.count("|") != below.count("|"):
                broken.append(f"{page.relative_to(PROJECT)}: {head}")
    assert broken == []


def test_an_options_value_is_no_argument() -> None:
    forecast = group()
    for name in ("ledger", "forecast"):
        forecast = forecast.commands[name]
    words = ["--from", "retrain.yaml", "--policy=last", "--json"]
    assert arguments_of(forecast, words, "") == []
    assert arguments_of(forecast, [*words, "visits"], "") == ["visits"]


def test_the_links_of_pages_lead_somewhere() -> None:
    broken = []
    for page in PAGES:
        for target, _ in LINK.findall(page.read_text()):
            is_made = "reference/" in target and (PROJECT / "docs") in page.parents
            if (
                not target.startswith(("http", "mailto"))
                and not is_made
                and not (page.parent / target).exists()
            ):
                broken.append(f"{page.relative_to(PROJECT)}: {target}")
    assert broken == []


def test_the_messages_of_the_troubleshooting_page_are_those_of_the_code() -> None:
    sources = [
        path
        for folder in ("epsilonflow", "flows", "tasks", "algorithms", "data")
        for path in sorted((PROJECT / folder).rglob("*.py"))
    ]
    said = {
        template
        for path in sources
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp)
        and " " in (template := text_in(node, computed="{}"))
    }
    page = (PROJECT / "docs/how-to/troubleshooting.md").read_text()
    rows = re.findall(r"^\| (`.*?`) \|", page, flags=re.MULTILINE)
    messages = [message for row in rows for message in re.findall(r"`([^`]+)`", row)]
    patterns = {
        message: re.compile(".+?".join(map(re.escape, message.strip(". ").split("..."))))
        for message in messages
    }
    assert len(messages) > 40
    assert [text for text, pattern in patterns.items() if not any(map(pattern.search, said))] == []


def test_the_readme_is_one_page() -> None:
    assert len((PROJECT / "README.md").read_text().split()) <= 900


def test_each_method_is_explained() -> None:
    """By what its paper says, what is repaired and what it gives."""
    text = (PROJECT / "docs/explanation/methods.md").read_text()
    sections = dict(re.findall(r"^### (\w+)\n(.*?)(?=^### |\Z)", text, flags=re.DOTALL | re.MULTILINE))
    assert sections.keys() == CATALOGUE.keys()
    parts = re.compile(r"\*\*The\s+paper\*\*.*\*\*Repaired:\*\*.*\*\*It\s+gives\*\*\s+\w", flags=re.DOTALL)
    assert [name for name, words in sections.items() if not parts.search(words)] == []


def examples(page: Path) -> list[str]:
    """The blocks of Python on a page."""
    return re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)


PYTHON = [
    (page.relative_to(PROJECT).as_posix(), place) for page in PAGES for place, _ in enumerate(examples(page))
]
# These have tests of their own.
PYTHON.remove(("README.md", 0))
PYTHON.remove(("docs/how-to/serve-the-model.md", 0))
PYTHON.remove(("docs/how-to/serve-the-model.md", 1))


@pytest.mark.parametrize(("page", "place"), PYTHON)
def test_an_example_in_python_runs(
    finished_once: Checkout, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, page: str, place: int
) -> None:
    (tmp_path / "artifacts").symlink_to(finished_once.root / "artifacts")
    np.save(tmp_path / "new_visits.npy", np.zeros((3, 1, 8, 8), np.float32))
    monkeypatch.chdir(tmp_path)
    X = torch.rand(400, 5, generator=torch.Generator().manual_seed(0))
    given: dict[str, Any] = {"model": torch.nn.Linear(5, 2), "X": X, "y": (X[:, 0] > 0.5).long()}
    given["patient_ids"] = [place // 3 for place in range(400)]
    imported_library("torch")  # as transformers needs it beside a CPU build
    exec(examples(PROJECT / page)[place].replace(".csv", ".npy"), given | {"inputs": torch.zeros(2, 1, 8, 8)})


def test_the_example_of_fit_gives_what_it_says() -> None:
    code = examples(PROJECT / "README.md")[0]
    X = torch.rand(400, 5, generator=torch.Generator().manual_seed(0))
    given: dict[str, Any] = {"model": torch.nn.Linear(5, 2), "X": X, "y": (X[:, 0] > 0.5).long()}
    imported_library("torch")  # as transformers needs it beside a CPU build
    exec(code, given)
    assert 2.9 < given["result"].epsilon["pld"] <= 3.0
    assert len(given["result"].trace) == 30 and given["result"].card is not None


README = (PROJECT / "README.md").read_text()


def typed(after: str, before: str) -> list[list[str]]:
    """The commands of the README between two texts, in words."""
    block = README.split(after)[1].split(before)[0]
    return [line.split("#")[0].split() for line in block.splitlines() if line.startswith("    ")]


def test_no_command_of_the_readme_is_left_out_of_those_that_run() -> None:
    """But for `make run`, which installs, and what follows from it."""
    every = re.findall(
        r"^ {4}((?:epsilonflow|cd|make|source|pip|python|prefect|dvc) .*)$", README, re.MULTILINE
    )
    run = [
        *typed("Next:\n", "epsilonflow is on no package index"),
        *typed("## Your own table\n", "## What comes out"),
    ]
    assert [line.split("#")[0].split() for line in every][2:] == run
    assert every[:2] == ["make run", "source .venv/bin/activate"]


def test_the_first_commands_of_the_readme_run_as_typed(
    tmp_path: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after the other, in a clone after its first run, which `make run` makes."""
    if not os.environ.get("EPSILONFLOW_DATA_MIRROR"):
        pytest.skip("downloads Adult; set EPSILONFLOW_DATA_MIRROR to a folder that has it")
    commands = typed("Next:\n", "epsilonflow is on no package index")
    assert [words[1] for words in commands] == ["doctor", "plan", "run", "card", "ledger", "predict"]
    monkeypatch.chdir(new_checkout(tmp_path / "clone", own_home).root)
    (tmp_path / "clone/examples").symlink_to(PROJECT / "examples")
    stay_in_this_process(monkeypatch)
    for words in commands:
        done = CliRunner().invoke(app, words[1:])
        assert done.exit_code == 0, (words, done.output)
    assert len(done.stdout.splitlines()) == 4


def test_the_readmes_commands_for_a_table_of_ones_own_run_as_typed(
    tmp_path: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = typed("## Your own table\n", "## What comes out")
    assert [words[:2][-1] for words in commands] == ["init", "clinic", "data", "plan", "run", "release"]
    monkeypatch.chdir(new_checkout(tmp_path / "clone", own_home).root)
    (tmp_path / "clone/examples").symlink_to(PROJECT / "examples")
    stay_in_this_process(monkeypatch)
    for program, *words in commands:
        if program == "cd":
            monkeypatch.chdir(words[0])
            continue
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, (words, done.output)
    assert {"model.safetensors", "privacy_card.json"} <= {path.name for path in Path("release").iterdir()}


def blocks() -> Iterator[tuple[str, str]]:
    """Every block of YAML with its page."""
    for page in PAGES:
        for block in re.findall(r"(?:^    [^\n]*\n|^\n(?=    ))+", page.read_text(), flags=re.MULTILINE):
            with suppress(YAMLError):
                if isinstance(YAML(typ="safe", pure=True).load(dedent(block)), dict):
                    yield page.relative_to(PROJECT).as_posix(), dedent(block)


@pytest.mark.parametrize(("page", "block"), list(blocks()))
def test_settings_that_are_written_down_are_allowed(page: str, block: str) -> None:
    """Those of params.yaml by the group, those of a search, and parts of a data card."""
    document = YAML(typ="safe", pure=True).load(block)
    if document.keys() <= set(DataCard.model_fields):
        if "reader" in document and "..." not in block:
            TypeAdapter(Format).validate_json(json.dumps(document["reader"]))
        return
    files: dict[str, Any] = {"space": Tuning, "spread": Retraining}
    for key in files.keys() & document.keys():
        files[key].model_validate_json(json.dumps(document))
        return
    assert document.keys() <= set(params.GROUPS), page
    for group, values in document.items():
        whole = {"model": {"seed": 0}, "data": {"dataset": "cifar-10"}}.get(group, {}) | values
        params.parse({group: whole}, reads=(group,))


@pytest.mark.parametrize(
    ("page", "file"),
    [
        ("how-to/tune.md", "tune.yaml"),
        ("tutorials/weekly.md", "retraining/retrain.yaml"),
        ("tutorials/weekly.md", "retraining/visits-weekly.yaml"),
    ],
)
def test_who_installed_the_package_finds_the_example_on_its_page(page: str, file: str) -> None:
    yaml = YAML(typ="safe", pure=True)
    written = [yaml.load(block) for name, block in blocks() if name == f"docs/{page}"]
    assert yaml.load(PROJECT / "examples" / file) in written


def test_the_made_up_weeks_of_the_tutorial_fit_its_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data/cards").mkdir(parents=True)
    shutil.copyfile(
        PROJECT / "examples/retraining/visits-weekly.yaml", tmp_path / "data/cards/visits-weekly.yaml"
    )
    monkeypatch.chdir(tmp_path)
    exec(examples(PROJECT / "docs/tutorials/weekly.md")[0], {})
    reader = RowReader(data_card("visits-weekly", tmp_path / "data/cards"), {})
    weeks = sorted((tmp_path / "datasets/raw/visits-weekly").iterdir())
    assert [sum(rows.num_rows for rows in reader.tables("train", week)) for week in weeks] == [200] * 6
    retraining = load_retraining(PROJECT / "examples/retraining/retrain.yaml")
    assert retraining.recipe is not None
    settings = params.parse(retraining.recipe.settings("visits-weekly", 1e-5), reads=RECIPE)
    places = {"destination": tmp_path / "prepared", "home": tmp_path / "home", "root": tmp_path}
    info = prepare(settings, mirror=None, cards=tmp_path / "data/cards", **places)
    assert plan_for(settings, info).steps == 300


def keys_of(document: Any, path: str = "") -> Iterator[str]:
    """Of a file of parameters, by dots, except those of what a library calls its options."""
    if not isinstance(document, dict) or not document:
        yield path
        return
    for name, inner in document.items():
        if path == "model.settings" and name in ("config", "options"):
            yield f"{path}.{name}"
        else:
            yield from keys_of(inner, f"{path}.{name}" if path else name)


def test_reference_is_made_from_the_code() -> None:
    pytest.importorskip("mkdocs")
    made = {name: make() for name, make in reference().PAGES.items()}
    assert (
        "| `privacy.epsilon` | of the whole run | number or null | `null` | > 0, <= 10000.0 |"
        in made["params"]
    )
    rows = [line.split(" | ") for line in made["params"].splitlines() if line.startswith("| `")]
    assert len(rows) > 200 and [row[0] for row in rows if len(row) < 5 or not row[1].strip()] == []
    assert "| `algorithm.clip_norm` |" in made["params"] and "### dp_sgd" in made["params"]
    assert "| `data.blocks` | the blocks to train on, if" in made["params"]
    # code is code, not text to escape
    assert "(`paper_update` brings back its update of s)" in made["params"]
    assert "| one person | What one record is" in made["command-line"]
    files = [PROJECT / "params.yaml", *(PROJECT / "presets").glob("*.yaml")]
    written = {key for file in files for key in keys_of(YAML(typ="safe", pure=True).load(file))}
    assert {key for key in written if f"| `{key}` |" not in made["params"]} == {
        "algorithm.name",
        "features.name",
    }
    assert "| `data.encoder.name` |" in made["params"]
    assert "## epsilonflow ledger forecast" in made["command-line"]
    assert "| `digits` |" in made["datasets"] and "### Categorical" in made["data-card"]
    names = set(re.findall(r"EPSILONFLOW_[A-Z_]+", made["environment"]))
    read = {
        name
        for folder in ("flows", "tasks", "algorithms", "data")
        for path in (PROJECT / folder).rglob("*.py")
        for name in re.findall(r'"(EPSILONFLOW_[A-Z_]+)"', path.read_text())
    }
    assert names == read


def test_the_reference_has_a_section_for_each_part_of_a_data_card() -> None:
    pytest.importorskip("mkdocs")
    page, parts = reference().data_card(), DataCard.model_json_schema()["$defs"]
    assert len(parts) > 30
    named = {name for name, part in parts.items() if part.get("properties")}
    assert {name for name in named if f"### {name}\n" not in page} == set()


def test_no_key_of_a_method_is_described_by_keys_that_it_does_not_have() -> None:
    pytest.importorskip("mkdocs")
    page = reference().params()
    assert page.count("each record takes part in exactly one step of each pass") == 1  # of dp_sgd alone
    assert "The other settings are" not in page


def test_the_site_is_built_strictly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mkdocstrings")
    pytest.importorskip("material")
    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")
    monkeypatch.chdir(PROJECT)
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    config = load_config("mkdocs.yml", strict=True, site_dir=str(tmp_path / "site"))
    config.plugins.on_startup(command="build", dirty=False)
    build(config)  # raises where a page has a warning
    api = (tmp_path / "site/reference/api/index.html").read_text()
    assert (tmp_path / "site/reference/verify_card.py").read_text() == Path(verify_card.__file__).read_text()
    assert "population" in api and "TrainedModel" in api


def reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference", PROJECT / "docs/reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_architecture_has_a_place_for_every_file() -> None:
    """Its own name, that of a folder below its package, or the step that it is."""
    page = (PROJECT / "docs" / "explanation" / "architecture.md").read_text()
    named = set(re.findall(r"\w+\.py\b|\w+/(?!\w)", page))
    named |= {f"{step}.py" for step in re.findall(r"`tasks\.(\w+)`", page)}
    files = [
        path.relative_to(PROJECT)
        for package in ("algorithms", "tasks", "data", "flows", "epsilonflow")
        for path in (PROJECT / package).rglob("*.py")
        if not path.name.startswith("__")
    ]
    places = {str(path): {path.name, *(f"{folder}/" for folder in path.parts[1:-1])} for path in files}
    assert [path for path, names in places.items() if not names & named] == []

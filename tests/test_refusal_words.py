"""Every refusal with a code, in the words of each front end that a person can meet it in."""

import ast
import pickle
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from inspect import signature
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import typer
from click import Command
from pydantic import BaseModel

import algorithms
import data
from algorithms.errors import PLAIN, RefusedError, Words
from algorithms.features import FEATURES
from algorithms.fit_refusals import FIT
from algorithms.fitting import fit
from algorithms.methods import CATALOGUE
from data.card import DataFault, DataRefusedError
from epsilonflow.sklearn import DPClassifier
from epsilonflow.sklearn_refusals import ESTIMATORS
from flows.cli.main import app
from tasks.config.params import MODELS
from tasks.refusals import AUDITS, KINDS, PIPELINE
from tasks.runs.dvc_stages import STAGES
from tests.support.source_texts import text_in

ROOT = Path(algorithms.__file__).parent
FRONT_ENDS = {"plain": PLAIN, "pipeline": PIPELINE, "audits": AUDITS, "fit": FIT, "estimators": ESTIMATORS}
PROGRAMS = {
    "fit_refusals.py": "the words of a front end",
    "privacy/card/verify_card.py": "a program of its own, with options of its own",
}
"""Files of `algorithms` that may name a command."""
NOT_OF_FIT = {
    "learned.": "fit learns the scale of a number at most",
    "network.": "fit takes a module as it is, in 32 bits",
    "records.": "fit takes arrays",
    "compute.shard_": "fit is one process",
    "compute.offload": "fit is one process",
    "target.evaluation.": "fit has no held-out records",
    "target.diagnostics": "fit has no diagnostics",
}
"""Settings that fit has not, so that it meets no refusal that names them."""
NOT_OF_ESTIMATORS = NOT_OF_FIT | {
    "analysis_needs_delta": "of the accountant pure",
    "analysis_not_pure": "of the accountant pure",
    "epsilon_below_orders": "of the accountant rdp",
    "filter_needs_delta": "of the accountant pure",
    "gaussian_pure": "of the accountant pure",
    "no_bound_by_rdp": "of the accountant rdp",
    "trial_profile": "of a search",
}
"""The same for estimators, whose accountant is PLD; some by the code."""


@dataclass(frozen=True)
class Coded:
    """What is raised with a code. fields: the names of its values."""

    code: str
    template: str
    fields: frozenset[str]

    def sentence(self, words: Words) -> str:
        """The sentence, with made-up values."""
        values = {name: _Value(name) for name in self.fields}
        return words.sentence(RefusedError(self.template, code=self.code, **values))

    def slots(self, words: Words) -> list[str]:
        """The settings that the sentence names, in the raiser's terms; a sentence of the front end's own has none."""
        return [] if self.code in words.sentences else re.findall(r"\{(\w+\.[\w.]+)\}", self.template)


class _Value:
    """A value that can be formatted as a number, and as a text."""

    def __init__(self, name: str) -> None:
        self._text = "This is so." if name == "message" else "7"

    def __format__(self, spec: str) -> str:
        return self._text


@cache
def trees() -> Mapping[str, ast.Module]:
    """The modules of `algorithms`, by their paths there."""
    paths = sorted(ROOT.rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in paths}


@cache
def nodes(path: str) -> list[ast.AST]:
    """All nodes of a module's tree, in the order of `ast.walk`."""
    return [*ast.walk(trees()[path])]


@cache
def coded() -> Mapping[str, Coded]:
    """All codes in `algorithms`; the barrier raises errors of the gradients again, with their `message`."""
    of_code: dict[str, Coded] = {}
    for path in trees():
        for node in nodes(path):
            if not isinstance(node, ast.Call):
                continue
            keywords = {key.arg: key.value for key in node.keywords}
            if "code" not in keywords:
                continue
            names = frozenset(str(name) for name in keywords if name not in ("code", None))
            for code in ast.walk(keywords["code"]):
                if not isinstance(code, ast.Constant):
                    continue
                template = text_in(node.args[-1], computed="7")
                match ast.unparse(node.func):
                    case "UnsupportedModelError":
                        template, names = "{message}", names | {"message"}
                    case "read_tensors":  # which is given what to do
                        template, names = "7; " + template + ".", names
                one = Coded(code.value, template, names)
                other = of_code.setdefault(one.code, one)
                assert template == other.template, f"{one.code} has two meanings"
                of_code[one.code] = Coded(one.code, template, names | other.fields)
    return of_code


FOLDERS = (Path(data.__file__).parent, *(ROOT.parent / name for name in ("tasks", "flows", "epsilonflow")))
OF_PIPELINE = {
    "RefusedError",
    "BudgetRefusedError",
    "ModelRefusedError",
    "ParamsRefusedError",
    "EmptySearchError",
    "TooFewBlocksError",
}
"""The errors whose code is a kind of the pipeline's."""


@dataclass(frozen=True)
class OfKind:
    """A refusal above `algorithms`. code: its kind; empty for an error that takes the sentence of another."""

    error: str
    code: str
    template: str
    fields: frozenset[str]

    @property
    def values(self) -> dict[str, Any]:
        """A made-up value for each field."""
        return {name: _Value(name) for name in self.fields}


@cache
def of_kinds() -> tuple[OfKind, ...]:
    """The refusals in `data`, `tasks`, `flows` and `epsilonflow`."""
    refusals = []
    for path in sorted(path for folder in FOLDERS for path in folder.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "RefusedError(" in text or "BlocksError(" in text else ():
            if isinstance(node, ast.Call) and (error := ast.unparse(node.func)) in OF_PIPELINE | {
                "DataRefusedError"
            }:
                keywords = {str(key.arg): key.value for key in node.keywords}
                code = ast.unparse(keywords.pop("code", ast.Constant(""))).strip("'")
                refusals.append(OfKind(error, code, text_in(node.args[0], computed="7"), frozenset(keywords)))
    return tuple(refusals)


def _commands(command: Command, prefix: str = "") -> Iterator[tuple[str, Command]]:
    for name, inner in getattr(command, "commands", {}).items():
        yield f"{prefix}{name}", inner
        yield from _commands(inner, f"{prefix}{name} ")


COMMANDS = dict(_commands(typer.main.get_command(app)))
OPTIONS = {option for command in COMMANDS.values() for part in command.params for option in part.opts}
KEYS = {
    *(f"{group}.{key}" for group, model in MODELS.items() for key in model.model_fields),
    *(f"algorithm.{part.name}" for kind in CATALOGUE.values() for part in fields(kind)),
    *(f"features.{part.name}" for kind in FEATURES.values() for part in fields(kind)),
    *("algorithm.name", "features.name"),
}


def _any_of(words: Iterator[str] | set[str]) -> str:
    return "|".join(map(re.escape, sorted(words, key=len, reverse=True)))


FOREIGN = re.compile(
    rf"(?<![\w.{{])(?:{_any_of(KEYS)})\b|params\.yaml|data card's|\bdvc\b"
    rf"|epsilonflow (?:{_any_of({name.split()[0] for name in COMMANDS})})\b"
    rf"|(?<![\w-])(?:{_any_of({name for name in OPTIONS if name.startswith('--')})})\b"
    rf"|\b(?:{_any_of(set(STAGES))}) stage\b|\b(?:the|all) stages\b|`(?:{_any_of(set(STAGES))})`"
)
"""A key of params.yaml, a stage or a command."""


def _has(kind: Any, path: str) -> bool:
    """Whether a class of settings has a setting at a path of names; a mapping has all."""
    name, _, rest = path.partition(".")
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        inner = kind.model_fields[name].annotation if name in kind.model_fields else None
    elif is_dataclass(kind):
        inner = get_type_hints(kind).get(name)  # which are texts in some modules
    else:
        return str(kind).startswith("dict")
    kinds = [inner, *getattr(inner, "__args__", ())]
    return inner is not None and (not rest or any(_has(one, rest) for one in kinds))


def _is_key(name: str) -> bool:
    group, _, path = name.partition(".")
    kinds = {"algorithm": CATALOGUE.values(), "features": FEATURES.values()}.get(group, [MODELS.get(group)])
    return path == "name" or any(_has(kind, path) for kind in kinds)


def test_the_codes_are_the_refusals_that_depend_on_who_asked() -> None:
    assert (
        len(coded()) > 90 and {"batch_above_records", "budget_exceeded", "device_missing"} <= coded().keys()
    )


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_every_refusal_is_a_sentence_in_each_front_end(front_end: str) -> None:
    words = FRONT_ENDS[front_end]
    for one in coded().values():
        assert re.fullmatch(r"\S[^\n{}]+[^.\s]\.", one.sentence(words)), one.code
    assert set(words.sentences) <= coded().keys()


def test_every_refusal_of_a_data_set_is_a_sentence_of_one_of_the_kinds() -> None:
    every = [one for one in of_kinds() if one.error == "DataRefusedError" and one.code != "self.code"]
    for one in every:
        refusal = DataRefusedError(one.template, code=one.code, **one.values)
        assert re.fullmatch(r"\S[^\n{}]+[^.\s]\.?", str(refusal)), one.template
    assert {one.code for one in every} == {*get_args(DataFault)}


def test_every_refusal_of_the_pipeline_is_a_sentence_of_one_of_the_kinds() -> None:
    every = [one for one in of_kinds() if one.error in OF_PIPELINE and one.template != "7"]
    for one in every:
        sentence = PIPELINE.sentence(RefusedError(one.template, code=one.code, **one.values))
        assert re.fullmatch(r"\S([^\n]*[^.\s])?\.?", sentence), one.template
    assert {one.code for one in every} == {*KINDS}
    assert KINDS.keys().isdisjoint(coded())


def test_a_refusal_of_a_data_set_crosses_processes_and_takes_another_sentence() -> None:
    refusal = DataRefusedError("{path} has {what!r}.", code="unreadable_file", path="a.csv", what="{x}")
    more = pickle.loads(pickle.dumps(refusal.with_more("See row 3.")))
    assert (str(refusal), str(more)) == ("a.csv has '{x}'.", "a.csv has '{x}'. See row 3.")
    assert (more.code, more.fields["path"]) == ("unreadable_file", "a.csv")


@pytest.mark.parametrize("front_end", ["plain", "fit", "estimators"])
def test_only_the_pipeline_speaks_of_its_keys_stages_and_commands(front_end: str) -> None:
    said = [one.sentence(FRONT_ENDS[front_end]) for one in coded().values()]
    assert [sentence for sentence in said if FOREIGN.search(sentence)] == []


def test_the_pipeline_names_keys_stages_and_commands_that_exist() -> None:
    for one in coded().values():
        names = [PIPELINE.name(slot) for slot in one.slots(PIPELINE)]
        assert [name for name in names if " " not in name and not _is_key(name)] == [], one.code
        sentence = one.sentence(PIPELINE)
        for command in re.findall(r"`epsilonflow ([a-z]+ [a-z]+)", sentence):
            assert command in COMMANDS, one.code
        for stage in re.findall(r"the (\w+) stage\b", sentence):
            assert stage in STAGES, one.code


@pytest.mark.parametrize(
    ("words", "arguments", "absent"),
    [
        (FIT, signature(fit).parameters, NOT_OF_FIT),
        (ESTIMATORS, DPClassifier().get_params(), NOT_OF_ESTIMATORS),
    ],
)
def test_in_python_a_refusal_names_arguments_that_exist(
    words: Words, arguments: Mapping[str, Any], absent: Mapping[str, str]
) -> None:
    unknown = [
        (one.code, slot)
        for one in coded().values()
        for slot in one.slots(words)
        if not (
            (slot.startswith("method.") and _is_key(slot.replace("method.", "algorithm.", 1)))
            or (slot.startswith(("target.", "compute.")) and words.name(slot) in arguments)
            or slot in PLAIN.names
            or one.code in absent
            or slot.startswith(tuple(absent))
        )
    ]
    assert unknown == []


def test_every_refusal_outside_of_data_is_a_kind_of_refused_error() -> None:
    bases = {
        node.name: node.bases
        for folder in FOLDERS[1:]
        for path in folder.rglob("*.py")
        if "RefusedError(" in (text := path.read_text(encoding="utf-8")) and "class " in text
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ClassDef) and node.name.endswith("RefusedError")
    }
    assert len(bases) >= 2
    assert {ast.unparse(base) for of_one in bases.values() for base in of_one} == {"RefusedError"}


COUNTING = ("privacy/accounting/", "privacy/ledger/composition.py", "core/calibration.py", "core/plan.py")
"""Where it is decided what a run costs, by the beginnings of paths."""
OF_THE_PLAN = {"not_the_next_release", "no_further_release"}
"""Codes of a method that does not do what it planned, which no setting changes."""
OF_CODE = {
    "the event 7 has a rule already",
    "the event 7 is not one of 7",
    "an event's field must be a number",
    "7 is planned 7 times",
    "a Rényi filter needs an order above 1",
    "7 counts a run by its events",
    "the adjacency 7 is not known",
    "epsilon must be at least 0",
    "delta must lie between 0 and 1",
}
"""How refusals of a wrong argument in Python begin."""


def test_every_refusal_of_an_accountant_names_a_setting_or_the_document_to_check() -> None:
    calls = [
        node
        for path in trees()
        if path.startswith(COUNTING)
        for node in nodes(path)
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("RefusedError")
    ]
    silent = []
    for call in calls:
        code, text = (
            next((key.value for key in call.keywords if key.arg == "code"), None),
            text_in(call.args[0], computed="7"),
        )
        names_setting = code is not None and re.search(r"\{\w+\.[\w.]+\}|\{setting\}", text)
        if (
            not names_setting
            and "document" not in text
            and (code is None or text_in(code, computed="7") not in OF_THE_PLAN)
        ):
            silent.append(text)
    assert len(calls) > 40
    assert [text for text in silent if not text.startswith(tuple(OF_CODE))] == []
    assert all(any(text.startswith(known) for text in silent) for known in OF_CODE)


def test_refusals_of_a_delta_of_0_name_both_settings_that_have_to_change() -> None:
    """Another accountant is refused at a delta of 0, and a delta above 0 with the accountant pure."""
    of_pure = [
        one for one in coded().values() if re.search(r"pure epsilon|delta is 0|needs a delta", one.template)
    ]
    assert len(of_pure) > 4
    for one in of_pure:
        assert {"target.delta", "target.accountant"} <= {*re.findall(r"\{([\w.]+)\}", one.template)}, one.code


def _texts(path: str) -> Iterator[str]:
    """The texts of a module that have several words; docstrings are for its readers."""
    passed = {node.value for node in nodes(path) if isinstance(node, ast.Expr)}
    for node in nodes(path):
        if not isinstance(node, ast.Constant | ast.JoinedStr):
            continue
        if isinstance(node, ast.JoinedStr):
            passed |= set(node.values)
        if node not in passed and " " in (text := text_in(node, computed="7")):
            yield text


def test_algorithms_name_no_key_of_params_no_stage_and_no_command() -> None:
    named = [
        f"{path}: {text}"
        for path in trees()
        if path not in PROGRAMS
        for text in _texts(path)
        if FOREIGN.search(text)
    ]
    assert named == []

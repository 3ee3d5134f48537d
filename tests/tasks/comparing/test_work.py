"""Trials that are run: their results, a crash, what fails or is refused, and comparisons of what is no class."""

import hashlib
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from ruamel.yaml import YAML

from algorithms.core.training import train
from algorithms.models import build
from algorithms.privacy.barrier.barrier import ComputeConfig
from data.card import DataRefusedError
from data.prepared import load
from data.readers.records import RecordBatch
from tasks.comparing import trial as one_trial
from tasks.comparing.definition import groups
from tasks.comparing.report import report, results
from tasks.comparing.trial import (
    curve_steps,
    info_of,
    mean_losses,
    prepare_dataset,
    prepared_folder,
    trial_records,
)
from tasks.comparing.work import ComparisonWork, lock_comparison, plan_group, prepare_data, run_group, work_of
from tasks.config.params import ParamsRefusedError
from tests.support.cards import card, csv_of, number
from tests.support.comparisons import PROJECT, document, run_here, small, write
from tests.support.public_texts import publish
from tests.support.refusals import refused_as
from tests.support.waiting import before_long
from tests.support.warm_processes import ModuleProcess


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> ComparisonWork:
    """The tiny comparison, run once; not to be changed."""
    return run_here(small(tmp_path_factory.mktemp("finished") / "checkout"), document())


def test_every_trial_has_a_row_with_its_numbers(finished: ComparisonWork) -> None:
    table = results(finished.workspace, finished.trials)
    assert list(table["digest"]) == [trial.digest for trial in finished.trials]
    assert table["accuracy"].between(0.2, 1).all()
    private = table[table["method"] == "dp_sgd"]
    assert list(private["epsilon"]) == [1.0, 4.0]
    assert (private["epsilon_planned"] <= private["epsilon"]).all()
    assert (private["epsilon_planned"] > 0.99 * private["epsilon"]).all()
    np.testing.assert_allclose(private["epsilon_spent"], private["epsilon_planned"], rtol=1e-6)
    plain = table[table["method"] == "plain"]
    assert plain[["epsilon", "epsilon_spent", "epsilon_planned", "delta"]].isna().all().all()
    assert (table["steps"] == 5).all()


def test_an_objective_is_the_mean_training_loss_and_the_regularisation(finished: ComparisonWork) -> None:
    trial = finished.trials[0]
    curve = pd.read_parquet(finished.workspace.trials / f"{trial.digest}.curve.parquet")
    assert list(curve["step"]) == [0, 1, 2, 3, 4, 5]
    assert curve["objective"].iloc[0] == pytest.approx(np.log(10), rel=1e-6)  # the model starts at zero
    result = finished.workspace.result(trial.digest)["results"]
    assert curve["objective"].iloc[-1] == pytest.approx(result["objective"], rel=1e-9)
    assert (np.diff(curve["epsilon"]) > 0).all()
    assert curve["epsilon"].iloc[-1] == pytest.approx(result["epsilon_spent"])


def test_mean_losses_are_those_of_each_point() -> None:
    model = build("softmax", input_shape=(3,), classes=4, seed=0)
    draw = np.random.default_rng(0)
    part = RecordBatch(draw.normal(size=(5000, 3)).astype(np.float32), draw.integers(0, 4, 5000))
    parameters = torch.from_numpy(draw.normal(size=(40, model.parameter_count)).astype(np.float32))
    inputs, labels = torch.from_numpy(part.features), torch.from_numpy(part.labels)
    expected = [
        model.losses(model.outputs(model.by_name(point), inputs), labels).double().mean()
        for point in parameters
    ]
    np.testing.assert_allclose(mean_losses(model, parameters, part), expected, rtol=1e-6)


def test_a_curve_of_many_steps_has_about_200_points() -> None:
    for few in (7, 200):
        assert curve_steps(few) == set(range(1, few + 1))
    many = curve_steps(10_000)
    assert 150 <= len(many) <= 200
    assert {1, 10_000} <= many
    assert max(many) == 10_000


def test_diagnostics_are_recorded_of_the_first_seed_alone(tmp_path: Path) -> None:
    content = document() | {"seeds": 2, "record": {"diagnostics": True}}
    del content["methods"]["plain"]
    work = run_here(small(tmp_path / "checkout"), content | {"epsilons": [1.0]})
    first, second = work.trials
    table = pd.read_parquet(work.workspace.trials / f"{first.digest}.diagnostics.parquet")
    assert list(table["step"]) == list(range(5))
    assert not (work.workspace.trials / f"{second.digest}.diagnostics.parquet").exists()


def test_the_number_of_runs_counts_those_that_the_file_no_longer_has(tmp_path: Path) -> None:
    root = small(tmp_path / "checkout")
    before = document()
    del before["methods"]["plain"], before["record"]
    run_here(root, before)
    work = run_here(root, before | {"epsilons": [2.0]})
    assert len(work.trials) == 1
    assert report(work, refused=[]).runs == 3


def test_folds_are_of_the_union_and_public_numbers_are_theirs(
    finished: ComparisonWork, tmp_path: Path
) -> None:
    root = small(tmp_path / "checkout")
    work = work_of(write(root, document() | {"folds": {"k": 4, "repeats": 2, "seed": 3}}), root)
    prepare_data(work)
    data = load(prepared_folder(work.workspace.store, work.trials[0]))
    union = np.concatenate([data.train_features, data.test_features])
    seen = []
    for trial in work.trials[:8]:
        both = trial_records(work.workspace.store, trial)
        assert info_of(work.workspace.store, trial) == both.info
        assert both.info.records == len(both.train.labels)
        assert both.info.test_records == len(both.test.labels)
        assert len(both.train.labels) + len(both.test.labels) == len(union)
        assert both.train.features.dtype == np.float32
        seen.append(both.test.features)
    for repeat in (seen[:4], seen[4:]):
        np.testing.assert_array_equal(_sorted(np.concatenate(repeat)), _sorted(union))
    assert not np.array_equal(seen[0], seen[4])


def _sorted(rows: Any) -> Any:
    return rows[np.lexsort(rows.reshape(len(rows), -1).T)]


def test_transformed_records_are_prepared_beside_the_others_and_stay_mapped(tmp_path: Path) -> None:
    root = small(tmp_path / "checkout")
    plain = work_of(write(root, document()), root).trials[0]
    trials = [plain, replace(plain, transform="scattering")]
    for trial, shape in zip(trials, [(1, 8, 8), (81, 2, 2)], strict=True):
        prepare_dataset(root, trial, root=root)
        both = trial_records(root, trial)
        assert both.train.features.shape[1:] == shape == info_of(root, trial).input_shape
        assert isinstance(both.train.features, np.memmap)
    assert prepared_folder(root, trials[1]).name == f"{prepared_folder(root, trials[0]).name}-scattering"


def test_a_fold_of_one_class_is_refused_before_anything_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def one_class(*_: object) -> None:
        raise DataRefusedError(
            "The training records of a fold are all of one class; choose fewer folds.", code="folds_unfit"
        )

    root = small(tmp_path / "checkout")
    work = work_of(write(root, document() | {"folds": {"k": 2}}), root)
    prepare_data(work)
    monkeypatch.setattr(one_trial, "check_classes", one_class)
    with lock_comparison(work.workspace):
        problems = plan_group(work.context, next(groups(work.trials)))
    assert "one class" in problems[0].sentence
    assert problems[0].in_words().startswith("dp_sgd on digits, softmax, epsilon 1: ")


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ({"algorithm": {"name": "dp_sgd", "expected_batch_size": 10**6, "steps": 1}}, "expected_batch_size"),
        (
            {"private": False, "algorithm": {"name": "dp_sgd", "expected_batch_size": 9, "steps": 1}},
            "adds noise",
        ),
        ({"algorithm": {"name": "non_private", "expected_batch_size": 9, "steps": 1}}, "adds no noise"),
        ({"algorithm": {"name": "dp_sgd", "expected_batch_size": 9, "steps": 1}, "delta": 0.5}, "at most"),
    ],
)
def test_what_cannot_be_planned_is_refused_with_a_sentence(
    finished: ComparisonWork, method: dict[str, Any], words: str
) -> None:
    work = work_of(
        write(finished.workspace.root, document() | {"methods": {"odd": method}}), finished.workspace.root
    )
    problems = plan_group(work.context, next(groups(work.trials)))
    assert len(problems) == 1
    assert words in problems[0].sentence
    assert "\n" not in problems[0].sentence


def test_what_is_done_is_not_done_again_unless_other_code_made_it(finished: ComparisonWork) -> None:
    assert finished.unfinished_trials(renew=False) == []
    assert finished.unfinished_trials(renew=True) == []
    other = ComparisonWork(
        finished.comparison, one_trial.TrialContext(finished.workspace, "other code"), finished.trials
    )
    assert other.unfinished_trials(renew=False) == []
    assert other.unfinished_trials(renew=True) == list(finished.trials)


def test_memory_in_the_file_limits_a_run_and_makes_no_other_run(
    finished: ComparisonWork, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = {"memory_mb": 3, "physical_batch": 50}
    root = finished.workspace.root
    work = work_of(write(root, document() | {"performance": limits}), root)
    assert work.unfinished_trials(renew=False) == []
    seen = []

    def watched(*arguments: Any, compute: ComputeConfig, **others: Any) -> Any:
        seen.append(compute)
        return train(*arguments, compute=compute, **others)

    monkeypatch.setattr(one_trial, "train", watched)
    with lock_comparison(work.workspace):
        assert run_group(work.context, work.trials[:1]) == []
    assert seen == [ComputeConfig(memory_mb=3, physical_batch=50)]


def test_a_trial_that_fails_stops_no_other_and_runs_when_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = small(tmp_path / "checkout")
    work = work_of(write(root, document() | {"seeds": 3}), root)
    failing = {trial.digest for trial in work.trials if trial.seed == 1}

    def fails_once(*given: Any, run: Any, **more: Any) -> Any:
        if run.run_id in failing:
            raise RuntimeError("out of\nluck")
        return train(*given, run=run, **more)

    with lock_comparison(work.workspace):
        prepare_data(work)
        group = next(groups(work.trials))
        monkeypatch.setattr(one_trial, "train", fails_once)
        (problem,) = run_group(work.context, group)
        monkeypatch.undo()
        assert problem.sentence == "out of luck"
        assert "RuntimeError" in (work.workspace.failures / f"{problem.trial.digest}.txt").read_text()
        assert work.workspace.finished_digests() == {trial.digest for trial in group} - {problem.trial.digest}
        assert run_group(work.context, (problem.trial,)) == []
    assert problem.trial.digest in work.workspace.finished_digests()


def test_a_request_to_stop_starts_no_further_trial(finished: ComparisonWork, tmp_path: Path) -> None:
    root = small(tmp_path / "checkout")
    work = work_of(write(root, document()), root)
    with lock_comparison(work.workspace):
        work.workspace.stop.touch()
        assert run_group(work.context, next(groups(work.trials))) == []
    assert work.workspace.finished_digests() == set()


def test_one_process_at_a_time(finished: ComparisonWork) -> None:
    with (
        lock_comparison(finished.workspace),
        refused_as("busy", ParamsRefusedError, comparison="tiny"),
        lock_comparison(finished.workspace),
    ):
        pass


def test_a_killed_comparison_leaves_only_finished_trials_and_goes_on(tmp_path: Path) -> None:
    """One of its trials would go on for hours, so that it is killed while it trains."""
    content = document() | {"seeds": 3, "epsilons": [1.0]}
    del content["methods"]["plain"]
    long = json.loads(json.dumps(content["methods"]["dp_sgd"]))
    long["algorithm"]["steps"] = 1_000_000
    begun = content | {"methods": {**content["methods"], "long": long}}
    root = small(tmp_path / "killed")
    process = ModuleProcess(
        "tests.support.comparisons", str(root), json.dumps(begun), cwd=PROJECT, env=os.environ
    )
    place = work_of(write(root, begun), root).workspace
    assert before_long(lambda: len(place.finished_digests()) == 3 or process.poll() is not None)
    process.kill()
    process.wait()
    left = {path: path.stat().st_mtime_ns for path in place.trials.glob("*.json")}
    assert len(left) == 3
    assert all(json.loads(path.read_text())["results"]["accuracy"] > 0 for path in left)

    content["seeds"] = 4
    work = run_here(root, content)
    assert {path: path.stat().st_mtime_ns for path in left} == left
    table = results(place, work.trials)
    assert len(table) == 4

    shutil.rmtree(place.trials)
    again = run_here(root, content)
    numbers = ["accuracy", "test_loss", "objective", "epsilon_spent", "digest"]
    pd.testing.assert_frame_equal(results(place, again.trials)[numbers], table[numbers])


CARD = card("mine", public=True, records={"train": 120, "test": 80})
TABLE = {
    "number": ({"target": {"bounds": [0, 10]}}, ["sum"], "r2"),
    "labels": ({"target": {"labels": ["big", "odd"]}}, ["big", "odd"], "micro_f1"),
}


def declare(root: Path, ending: str, lines: list[str], head: tuple[str, ...] = (), **keys: Any) -> None:
    """A card of public records, the first 120 of them to train on."""
    files = {}
    for name, some in (("train", lines[:120]), ("test", lines[120:])):
        path = root / f"{name}.{ending}"
        path.write_text("\n".join([*head, *some]) + "\n")
        files[name] = {"path": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    YAML(typ="safe", pure=True).dump(CARD | {"files": files} | keys, root / "data/cards/mine.yaml")


def compared(root: Path, problem: dict[str, Any], **keys: Any) -> Any:
    """A comparison on one problem: its table of results, and what its page shows."""
    content = document() | {"problems": [problem], "epsilons": [2.0]} | keys
    work = run_here(root, content)
    done = report(work, refused=[])
    return results(work.workspace, work.trials), done, (work.workspace.folder / "report.html").read_text()


@pytest.mark.parametrize(("kind", "folds"), [("number", {"k": 2}), ("labels", None)])
def test_a_number_and_labels_are_compared(tmp_path: Path, kind: str, folds: dict[str, Any] | None) -> None:
    root = small(tmp_path / "checkout")
    draw = np.random.default_rng(0).random((200, 2)).round(3)
    rows = [f"{a},{b},{5 * (a + b):.3f},{int(a > 0.5)},{int(b > 0.7)}" for a, b in draw]
    target, labels, headline = TABLE[kind]
    others = ({"name": n, "kind": "label" if n in labels else "ignored"} for n in ("sum", "big", "odd"))
    reader = csv_of(number("a", 0, 1), number("b", 0, 1), *others)
    declare(root, "csv", rows, ("a,b,sum,big,odd",), reader=reader, **target)
    more = {} if folds is None else {"folds": folds}
    table, done, page = compared(root, {"dataset": "mine", "model": "linear"}, **more)
    assert table[headline].notna().all() and "accuracy" not in table
    assert set(done.pictures) >= {headline, "objective"}
    assert f"{headline}_mean" in done.totals and "Accuracy" not in page
    plain = table[table["method"] == "plain"][headline]
    assert (plain > 0).all()  # five steps without noise are better than nothing


@pytest.mark.parametrize(
    ("target", "headline"),
    [
        ({"next": "token"}, "token_accuracy"),
        ({"tags": ["O", "B-WHO", "I-WHO"], "outside": "O", "words": 4}, "entity_f1"),
    ],
)
def test_next_tokens_and_tags_are_compared(tmp_path: Path, target: dict[str, Any], headline: str) -> None:
    root, public = small(tmp_path / "checkout"), tmp_path / "public"
    publish(public, causal="next" in target)
    lines = [{"text": "a good film", "tags": [n % 2, 0, len(target) % 2]} for n in range(200)]
    reader = {"kind": "texts", "format": "jsonl", "columns": ["text"]}
    reader |= {} if "next" in target else {"label": "tags"}
    declare(root, "jsonl", list(map(json.dumps, lines)), reader=reader, target=target)
    encoder = {"name": f"tokenizer/{public}", "settings": {"length": 6}}
    own = {"checkpoint": str(public), "adapter": {"rank": 2}}
    problem = {"dataset": "mine", "model": "huggingface", "model_settings": own, "transform": "encoder"}
    problem["encoder"] = encoder
    table, done, _ = compared(root, problem)
    assert table[headline].notna().all() and "accuracy" not in table
    assert table["test_loss"].notna().all() and table["objective"].notna().all()
    assert set(done.pictures) >= {headline, *(["perplexity"] if "next" in target else [])}
    if "next" in target:
        np.testing.assert_allclose(table["perplexity"], np.exp(table["test_loss"]))

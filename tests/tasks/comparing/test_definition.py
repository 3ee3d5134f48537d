"""What a comparison's file may say, the trials it makes, their digests, folds and curves."""

import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from algorithms.models import build
from algorithms.privacy.barrier.trace import Trace
from data import DataCard, DataRefusedError, DatasetInfo, dataset_info
from data.card import data_card
from data.readers.records import RecordBatch
from tasks.comparing import definition as comparison_trials
from tasks.comparing.definition import Fold, Trial, groups, load, trials, variants
from tasks.comparing.trial import ParameterTrail, TrialRecords, check_classes, mean_losses, split_by_fold
from tasks.comparing.work import work_of
from tasks.config.params import ParamsRefusedError
from tasks.runs.stage_main import refusals
from tests.support.comparisons import PROJECT, document, small, write
from tests.support.refusals import refused, refused_as

PLAIN = {"dataset": "digits", "model": "softmax"}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return small(tmp_path / "checkout")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"epsilon": [1.0]}, "unknown key epsilon"),
        ({"methods": {}}, "methods"),
        ({"delta": None}, "delta is None"),
        ({"delta": 1.5}, "delta is 1.5"),
        ({"epsilons": []}, "epsilons"),
        ({"epsilons": [1.0, -1.0]}, "epsilons.1 is -1.0"),
        ({"epsilons": [1.0, 1.0]}, "epsilons list 1.0 twice"),
        ({"epsilons": [float("nan")]}, "epsilons.0 is"),
        ({"seeds": 0}, "seeds is 0"),
        ({"seeds": "2"}, "seeds is '2'"),
        ({"folds": {"k": 1}}, "folds.k is 1"),
        ({"folds": {"k": 5, "shuffle": True}}, "unknown key folds.shuffle"),
        ({"problems": []}, "problems"),
        ({"problems": [{"dataset": "digits", "model": "softmax"}] * 2}, "twice"),
        ({"problems": [PLAIN, PLAIN | {"transform": "scattering"}]}, "twice"),
        ({"problems": [PLAIN | {"transform": "wavelets"}]}, "problems.0.transform is 'wavelets'"),
        ({"problems": [PLAIN | {"dataset": "adult", "transform": "scattering"}]}, "scattering takes images"),
        ({"problems": [{"dataset": "nist", "model": "softmax"}]}, "no data set 'nist'"),
        ({"problems": [{"dataset": "digits", "model": "oracle"}]}, "no model 'oracle'"),
        ({"methods": {"a": {}}}, "methods.a.algorithm is missing"),
        ({"methods": {"a": {"algorithm": {"steps": 1}}}}, "methods.a.algorithm: name is missing"),
        (
            {"methods": {"a": {"algorithm": {"name": "magic"}}}},
            "methods.a.algorithm.name: there is no algorithm",
        ),
        (
            {"methods": {"a": {"algorithm": {"name": "dp_sgd", "steps": 1, "tempo": 2}}}},
            "unknown key methods.a.algorithm.tempo",
        ),
        ({"methods": {"a": {"algorithm": {"name": "dp_sgd"}}}}, "methods.a.algorithm.steps is missing"),
        (
            {"methods": {"a": {"algorithm": {"name": "dp_sgd", "steps": 0}}}},
            "methods.a.algorithm.steps is 0",
        ),
        (
            {"methods": {"a": {"algorithm": {"name": "dp_sgd", "steps": 1}, "vary": {"tempo": [1]}}}},
            "unknown key methods.a.algorithm.tempo",
        ),
        ({"delta": 0}, "needs a delta above 0"),
        ({"record": {"objective": {"regularisation": -1.0}}}, "record.objective.regularisation is -1.0"),
        ({"published": "comparisons/none.csv"}, "none.csv is no CSV file"),
        ({"name": "other"}, "name must be 'tiny'"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence_that_names_the_key(
    root: Path, change: dict[str, Any], words: str
) -> None:
    path = write(root, document() | change)
    with refused(re.escape(words), refusals()):
        work_of(path, root)
    assert not (root / "artifacts").exists()


def test_files_that_are_no_comparison_are_refused(tmp_path: Path) -> None:
    for name, text in (("list", "- 1\n"), ("broken", "a: [\n"), ("date", "a: 2020-01-01\n")):
        path = tmp_path / f"{name}.yaml"
        path.write_text(text)
        with pytest.raises(ParamsRefusedError) as refusal:
            load(path)
        assert refusal.value.code in ("unreadable_file", "bad_keys") and f"{name}.yaml" in str(refusal.value)
    with refused_as("missing_file", ParamsRefusedError):
        load(tmp_path / "none.yaml")


def test_private_records_are_refused(root: Path) -> None:
    path = root / "data" / "cards" / "digits.yaml"
    text = path.read_text()
    path.unlink()
    path.write_text(text.replace("public: true", "public: false"))
    with refused_as("bad_keys", ParamsRefusedError, file="tiny.yaml", keys=("problems.dataset",)):
        work_of(write(root, document()), root)


def test_every_combination_is_a_trial_and_a_method_without_noise_runs_once(root: Path) -> None:
    work = work_of(write(root, document() | {"seeds": 2, "folds": {"k": 3, "repeats": 2}}), root)
    private = [trial for trial in work.trials if trial.epsilon is not None]
    assert len(private) == 2 * 2 * 3 * 2
    assert len(work.trials) - len(private) == 2 * 3 * 2
    assert len({trial.digest for trial in work.trials}) == len(work.trials)
    assert {(trial.fold.repeat, trial.fold.fold) for trial in private if trial.fold} == {
        (repeat, fold) for repeat in range(2) for fold in range(3)
    }


def test_varied_settings_make_methods_with_names_of_their_own(root: Path) -> None:
    changed = document()
    changed["methods"]["dp_sgd"]["vary"] = {"clip_norm": [0.5, 1.0], "update.momentum": [0.0, 0.9]}
    comparison = load(write(root, changed))
    found = [(v.setting, v.algorithm) for v in variants(comparison) if v.method == "dp_sgd"]
    assert [setting for setting, _ in found] == [
        f"clip_norm={c}, update.momentum={m}" for c in ("0.5", "1") for m in ("0", "0.9")
    ]
    assert found[-1][1]["update"] == {"learning_rate": 2.0, "momentum": 0.9}
    assert comparison.methods["dp_sgd"].algorithm["update"] == {"learning_rate": 2.0}


def test_pure_accounting_means_delta_0(root: Path) -> None:
    changed = document()
    changed["methods"]["dp_sgd"]["accountant"] = "pure"
    (variant,) = [v for v in variants(load(write(root, changed))) if v.method == "dp_sgd"]
    assert variant.delta == 0


@pytest.fixture
def trial(root: Path) -> Trial:
    return work_of(write(root, document()), root).trials[0]


def test_a_digest_is_of_all_that_decides_a_result(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    changes: dict[str, Any] = {
        "dataset": "adult",
        "card": "0",
        "model": "logistic",
        "settings": trial.settings | {"steps": 6},
        "accountant": "pld",
        "epsilon": 2.0,
        "delta": 1e-6,
        "seed": 1,
        "fold": Fold(5, 1, 0, 0),
        "record": {"objective": None, "curves": True},
        "transform": "scattering",
        "model_settings": {"freeze": ["1.bias"]},
        "features": {"name": "whitened"},
        "encoder": {"name": "wordllama"},
    }
    words = {"method": "other", "label": "other", "setting": "other"}
    assert changes.keys() | words.keys() == asdict(trial).keys()
    digests = {replace(trial, **{name: value}).digest for name, value in changes.items()}
    monkeypatch.setattr(comparison_trials, "FORMAT", comparison_trials.FORMAT + 1)
    digests.add(trial.digest)
    monkeypatch.undo()
    assert len(digests | {trial.digest}) == len(changes) + 2
    assert replace(trial, **words).digest == trial.digest
    assert len({replace(trial, seed=seed).noise_seed for seed in range(5)}) == 5


def test_a_default_that_is_written_out_is_the_same_trial(root: Path, trial: Trial) -> None:
    changed = document()
    changed["methods"]["dp_sgd"]["algorithm"]["clipping"] = "l2"
    assert work_of(write(root, changed), root).trials[0].digest == trial.digest


def test_a_changed_data_card_is_another_trial(root: Path, trial: Trial) -> None:
    path = root / "data" / "cards" / "digits.yaml"
    text = path.read_text().replace("test_fraction: 0.2", "test_fraction: 0.25")
    path.unlink()
    path.write_text(text)
    assert work_of(write(root, document()), root).trials[0].digest != trial.digest


def test_groups_share_what_they_are_named_by_and_are_small(root: Path) -> None:
    work = work_of(write(root, document() | {"seeds": 23}), root)
    made = list(groups(work.trials))
    assert [len(group) for group in made] == [20, 3] * 3
    assert [one for group in made for one in group] == list(work.trials)
    assert all(len({(one.method, one.epsilon) for one in group}) == 1 for group in made)


def test_every_comparison_of_the_project_is_accepted() -> None:
    for path in sorted((PROJECT / "comparisons").glob("*.yaml")):
        comparison = load(path)
        cards = {problem.dataset: _card(problem.dataset) for problem in comparison.problems}
        assert trials(comparison, cards, file=path.stem)


def _card(name: str) -> DataCard:
    return data_card(name)


def test_settings_may_be_tuned_by_epsilon(root: Path) -> None:
    changed = document()
    method = changed["methods"]["dp_sgd"]
    epsilon = changed["epsilons"][0]
    method["by_epsilon"] = {epsilon: {"clip_norm": 0.125, "update.momentum": 0.5}}
    trials = [trial for trial in work_of(write(root, changed), root).trials if trial.method == "dp_sgd"]
    tuned = [trial.settings for trial in trials if trial.epsilon == epsilon]
    others = [trial.settings for trial in trials if trial.epsilon != epsilon]
    assert {(own["clip_norm"], own["update"]["momentum"]) for own in tuned} == {(0.125, 0.5)}
    assert 0.125 not in {own["clip_norm"] for own in others}
    method["by_epsilon"] = {77.0: {"clip_norm": 0.125}}
    with refused_as(
        "bad_keys",
        ParamsRefusedError,
        file="tiny.yaml",
        method="dp_sgd",
        epsilon=77.0,
        keys=("methods.dp_sgd.by_epsilon", "epsilons"),
    ):
        work_of(write(root, changed), root)


def test_settings_of_features_may_be_tuned_by_epsilon(root: Path) -> None:
    changed = document()
    method = changed["methods"]["dp_sgd"]
    epsilon = changed["epsilons"][0]
    method |= {
        "features": {"name": "preconditioned"},
        "by_epsilon": {epsilon: {"features.noise": 7.0, "clip_norm": 0.125}},
    }
    trials = [trial for trial in work_of(write(root, changed), root).trials if trial.method == "dp_sgd"]
    tuned = {
        (trial.features["noise"], trial.settings["clip_norm"]) for trial in trials if trial.epsilon == epsilon
    }
    assert tuned == {(7.0, 0.125)}
    assert 7.0 not in {trial.features["noise"] for trial in trials if trial.epsilon != epsilon}


def test_diagnostics_leave_other_trials_as_they_were(root: Path) -> None:
    content = document() | {"record": {"curves": True}}
    before = work_of(write(root, content), root).trials[0]
    off = work_of(write(root, content | {"record": {"curves": True, "diagnostics": False}}), root).trials[0]
    on = work_of(write(root, content | {"record": {"curves": True, "diagnostics": True}}), root).trials[0]
    assert before.digest == off.digest != on.digest
    assert "diagnostics" not in before.record


PUBLISHED = {(0, 0): [1, 7], (0, 1): [3, 9], (7, 0): [2, 3, 8]}


class Cut(NamedTuple):
    train: NDArray[np.int64]
    test: NDArray[np.int64]


def fold(records: int, *, folds: int, repeat: int, index: int, seed: int) -> Cut:
    return Cut(*split_by_fold(records, Fold(folds, seed, repeat, index)))


@given(records=st.integers(2, 200), data=st.data(), repeat=st.integers(0, 5), seed=st.integers(0, 2**40))
def test_the_folds_of_a_repetition_are_a_partition_into_equal_parts(
    records: int, data: st.DataObject, repeat: int, seed: int
) -> None:
    folds = data.draw(st.integers(2, records))
    cuts = [fold(records, folds=folds, repeat=repeat, index=index, seed=seed) for index in range(folds)]
    assert sorted(np.concatenate([each.test for each in cuts])) == list(range(records))
    assert {len(each.test) for each in cuts} <= {records // folds, -(-records // folds)}
    for each in cuts:
        assert each.train.dtype == each.test.dtype == np.int64
        assert (np.diff(each.train) > 0).all() and (np.diff(each.test) > 0).all()
        assert sorted([*each.train, *each.test]) == list(range(records))


def test_a_cut_is_the_one_that_was_published() -> None:
    """Another cut would give other results under the same name."""
    assert fold(12, folds=5, repeat=0, index=0, seed=0).test.tolist() == PUBLISHED[0, 0]
    assert fold(12, folds=5, repeat=1, index=0, seed=0).test.tolist() == PUBLISHED[0, 1]
    assert fold(12, folds=5, repeat=0, index=4, seed=7).test.tolist() == PUBLISHED[7, 0]


def test_repetitions_and_seeds_cut_differently() -> None:
    cuts = {
        fold(1000, folds=5, repeat=repeat, index=0, seed=seed).test.tobytes()
        for repeat in range(4)
        for seed in range(4)
    }
    assert len(cuts) == 16


def test_every_record_is_tested_on_alike_often() -> None:
    """Pearson's chi-square over 200 repetitions of one fold in four; a false alarm in 10^6 (100 records)."""
    counts = np.zeros(100)
    for repeat in range(200):
        counts[fold(100, folds=4, repeat=repeat, index=1, seed=3).test] += 1
    assert ((counts - 50) ** 2 / (50 * 0.75)).sum() * 0.99 < 181  # chi-square, 99 degrees of freedom


def test_more_folds_than_records_are_refused() -> None:
    with refused_as("folds_unfit", DataRefusedError, folds=11, records=10):
        fold(10, folds=11, repeat=0, index=0, seed=0)


def test_a_fold_of_one_class_is_refused() -> None:
    chosen = fold(10, folds=5, repeat=0, index=2, seed=0)
    mixed = np.zeros(10, np.int64)
    mixed[[chosen.train[0], chosen.test[0]]] = 1
    check_classes(mixed, *chosen)
    for name, part in (("training", chosen.train), ("test", chosen.test)):
        labels = mixed.copy()
        labels[part] = 0
        with refused_as("folds_unfit", DataRefusedError, part=name):
            check_classes(labels, *chosen)


MODEL = build("logistic_through_origin", input_shape=(3,), classes=2, seed=0)


def info() -> DatasetInfo:
    return dataset_info(data_card("synthetic-logistic"))


def test_it_starts_where_the_algorithm_does_and_ends_where_that_ended() -> None:
    draw = np.random.default_rng(0)
    part = RecordBatch(draw.random((50, 3), dtype=np.float32), draw.integers(0, 2, 50))
    curve = ParameterTrail(lambda state: state, 5, start=torch.full((3,), 10.0))
    for step in (1, 2, 3):  # ends before its last planned step
        curve.on_state(step, torch.full((3,), 10.0 - step))
    frame = curve.frame(MODEL, Trace(), TrialRecords(info(), part, part), regularisation=0.5)
    points_ = torch.stack([torch.full((3,), value) for value in (10.0, 9.0, 8.0, 7.0)])
    rows = torch.from_numpy(part.features) @ points_.T
    signs = torch.from_numpy(2 * part.labels - 1)[:, None]
    losses = torch.nn.functional.softplus(-signs * rows).double().mean(dim=0)
    expected = losses + 0.5 * points_.double().square().sum(dim=1)
    assert list(frame["step"]) == [0, 1, 2, 3]
    assert frame["objective"].to_numpy() == pytest.approx(expected.numpy(), rel=1e-6)
    assert mean_losses(MODEL, points_, part) == pytest.approx(losses.numpy(), rel=1e-6)

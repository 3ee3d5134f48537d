"""A run with private held-out records: one release, charged with the training, and nothing else of them leaves."""

import hashlib
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, tzinfo
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from prefect.logging import disable_run_logger
from ruamel.yaml import YAML

from algorithms.core.plan import Plan
from algorithms.core.private_evaluation import EvaluationPlan
from algorithms.core.training import train as run_training
from algorithms.errors import ModelRefusedError
from algorithms.evaluation import ReleasedHistogram, count, histogram_for
from algorithms.models.saved import load_model, set_temperature
from algorithms.privacy.accounting import Budget
from algorithms.privacy.accounting.epsilon import REPLACE_ONE, epsilon
from algorithms.privacy.card import load, text, verify, verify_card
from algorithms.privacy.card.verify import check_charged
from algorithms.privacy.documents import PlanDocument
from algorithms.privacy.ledger import Composition
from algorithms.privacy.ledger import store as ledger_store
from data.prepared import HeldOut, load_held_out
from data.targets import Number as NumberTarget
from flows import deployed
from flows.cli.costs import cost_table, search_table
from tasks import evaluate, train
from tasks.config import params
from tasks.evaluation_counts import count_held_out
from tasks.export import release
from tasks.preflight.preview import RunPreview
from tasks.runs import store
from tasks.runs.charge import ChargedRun
from tasks.runs.summary import outcome_sentence, run_summary
from tasks.tracking.runs import curve_tables, summary
from tasks.tuning.search_plan import plan_search
from tasks.tuning.settings import Tuning, load_here
from tests.support.beginnings import Beginnings
from tests.support.cards import csv_of, label, number
from tests.support.offline_run import read_records
from tests.support.own_records import declared, finish
from tests.support.refusals import refused_as
from tests.support.soak import soak_but
from tests.support.visits import CARD, Visits, unprepared_visits, visits
from tests.support.workspace import Workspace, killed_in, prepared_digits, workspace

__all__ = ["declared", "prepared_digits", "unprepared_visits", "visits", "workspace"]

PRIVATE = CARD.replace("holdout: public ", "holdout: private ").replace(
    "holdout_why: the records are invented\n", ""
)
SECRET = "13.37731"
"""The distance of one person, in kilometres, who is held out."""


@pytest.fixture
def clinic(unprepared_visits: Visits, beginnings: Beginnings) -> Visits:
    """The same patients, of whom those held out are private."""
    clinic = unprepared_visits
    beginnings.begin("clinic", clinic.folders, lambda: clinic.prepare(PRIVATE))
    return clinic


@pytest.fixture
def reported(clinic: Visits, beginnings: Beginnings) -> Visits:
    """The clinic after its run, up to the report."""
    beginnings.begin("reported clinic", clinic.folders, lambda: (clinic.train(), clinic.finish()))
    return clinic


def plan_of(visits: Visits) -> PlanDocument:
    return PlanDocument.read(visits.place.root / "artifacts/plan.json")


def read(visits: Visits, name: str) -> Any:
    return json.loads((visits.place.root / "artifacts" / name).read_text())


def released_of(visits: Visits) -> ReleasedHistogram:
    return ReleasedHistogram.from_json((visits.place.root / "artifacts/evaluation.json").read_text())


def exact_cells(visits: Visits) -> Any:
    root = visits.place.root
    spec = released_of(visits).spec
    return count_held_out(
        spec, load_model(root / "artifacts/model.safetensors"), load_held_out(root / "datasets/prepared")
    )


def test_a_run_releases_one_histogram_and_all_metrics_follow_from_it(reported: Visits) -> None:
    assert set(read(reported, "evaluation.json")) == {"spec", "values", "noise_std"}
    receipt, sums = reported.place.receipt, reported.place.receipt["sha256"]
    content = (reported.place.root / "artifacts/evaluation.json").read_bytes()
    assert hashlib.sha256(content).hexdigest() == sums["evaluation.json"]
    trace = pd.read_parquet(reported.place.root / "artifacts/trace.parquet")
    assert trace["kind"].tolist()[-2:] == ["gradient", "evaluation"]
    assert (trace["kind"] == "evaluation").sum() == 1
    metrics = read(reported, "metrics.json")
    facts = {"held_out", "evaluation_epsilon", "not_shown", "by_class", "calibration", "thresholds"}
    facts |= {"epsilon", "delta", "run_id"}
    assert all(name in facts or name.startswith("test_") for name in metrics)
    assert set(metrics["test_accuracy"]) == {"value", "low", "high"}
    assert (metrics["held_out"], metrics["run_id"]) == ("private", receipt["run_id"])
    assert receipt["releases"] == len(trace)


METRICS = {
    *("accuracy", "auc", "calibration_error", "calibration_gap", "f1", "log_loss", "majority_accuracy"),
    *("positive_f1", "positive_share", "precision", "recall"),
}
ENDS = {"value", "low", "high"}
KEYS: dict[str, set[str]] = {
    "": {f"test_{name}" for name in METRICS}
    | {"by_class", "calibration", "differences", "groups", "not_shown", "recalibration", "thresholds"}
    | {"delta", "epsilon", "evaluation_epsilon", "held_out", "run_id"},
    "by_class": {"class", "precision", "recall", "share"},
    "calibration": {"low", "high", "predicted", "observed"},
    "differences": {"insurance"},
    "groups": {"insurance"},
    "insurance": METRICS - {"calibration_error"} | {"group", "size", "first", "second"},
    "not_shown": {f"test_{name}" for name in METRICS},
    "recalibration": {"temperature", "log_loss_gain"},
    "thresholds": {"threshold", "false_positive_rate", "lift", "precision", "recall", "selected"},
}
"""The keys that metrics.json may have under each key; of a metric its value and its interval."""
SENT = {"privacy/delta", "privacy/epsilon_total", "privacy/private", "test/epsilon", "test/held_out"} | {
    f"test/{name}{end}" for name in METRICS for end in ("", "_low", "_high")
}
TABLES = {
    "calibration": {"low", "high", "predicted", "observed_value", "observed_low", "observed_high"},
    "thresholds": KEYS["thresholds"] | {f"{name}_{end}" for name in KEYS["thresholds"] for end in ENDS},
}
FILES = {
    *("diagnostics.parquet", "evaluation.json", "metrics.json", "model.safetensors", "plan.json"),
    *("privacy_card.json", "receipt.json", "report.html", "trace.parquet", "confusion.csv", "confusion.png"),
    *("epsilon.csv", "epsilon.png", "noise.png", "per_class.csv", "per_class.png", "risk.png"),
}


def test_no_other_key_file_or_table_leaves(clinic: Visits) -> None:
    """Whoever adds one has to add it here, and say how it follows from the released histogram."""
    clinic.place.set("privacy", epsilon=9.0, evaluation={"by": ["insurance"], "recalibrate": True})
    clinic.train()
    clinic.finish()
    folder, metrics = clinic.place.root / "artifacts", read(clinic, "metrics.json")
    assert {path.name for path in folder.rglob("*") if path.is_file()} == FILES

    def check(document: Any, where: str) -> None:
        for one in document if isinstance(document, list) else [document]:
            if isinstance(one, dict):
                allowed = KEYS.get(where, ENDS)
                assert set(one) <= allowed, where
                for name, value in one.items():
                    check(value, name)

    check(metrics, "")
    assert set(summary(metrics, load(folder / "privacy_card.json"))) <= SENT
    tables = curve_tables(metrics)
    assert set(tables) <= set(TABLES)
    assert all(set(table.columns) <= TABLES[name] for name, table in tables.items())
    assert list(pd.read_csv(folder / "plots/per_class.csv").columns) == ["class", "accuracy", "records"]


def test_the_whole_run_costs_what_training_costs(clinic: Visits) -> None:
    """Training at epsilon 1, evaluation at 0.5: 1 on the card, in the ledger, and for a stranger."""
    clinic.place.set("privacy", evaluation={"epsilon": 0.5})
    clinic.train()
    clinic.finish()
    root, receipt = clinic.place.root, clinic.place.receipt
    card = load(root / "artifacts/privacy_card.json")
    assert card.setting.epsilon is not None
    assert 0.999 < card.setting.epsilon <= 1.0
    assert card.setting.evaluation_epsilon == pytest.approx(0.5, rel=1e-4)
    assert card.setting.evaluation_epsilon <= 0.5
    plan = clinic.place.ledger.balance("visits")
    assert plan.spent.epsilon == pytest.approx(card.setting.epsilon, rel=1e-9)
    assert receipt["epsilon"]["pld"] == card.setting.epsilon
    assert verify(card, root / "artifacts").passed
    check_charged(card, clinic.place.ledger)
    assert not [name for name, passed, _ in verify_card.verify(root / "artifacts") if passed is False]
    (reserved,) = [row for row in clinic.place.ledger.history("visits") if row.kind == "reserve"]
    assert json.loads(reserved.about)["held_out"] == "private"
    words = text.holdout(card)
    assert "at epsilon 0.5" in words
    assert "The held-out records." not in text.not_protected(card)


def test_training_is_the_same_with_and_without_an_evaluation(clinic: Visits) -> None:
    private = read(clinic, "plan.json")
    clinic.prepare(CARD)
    public = read(clinic, "plan.json")
    assert {key: private[key] for key in public} == public
    assert set(private) - set(public) == {"evaluation", "held_out"}


@pytest.mark.usefixtures("same_secrets")  # of which no file has six digits of an exact metric by chance
def test_everything_else_of_the_people_held_out_stays(
    clinic: Visits, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Their exact metrics, counts and values are in no file that leaves, and in no log."""
    caplog.set_level(logging.DEBUG)
    root = clinic.place.root
    data = load_held_out(root / "datasets/prepared")
    labels = np.asarray(data.test_labels)
    clinic.train()
    clinic.finish()
    for line in run_summary(root):
        logging.getLogger("summary").info("%s: %s", *line)
    exact = evaluate.metrics_of(root / "artifacts/model.safetensors", root / "datasets/prepared")
    release(root / "artifacts", root / "release", key=None)
    texts = {path: path.read_bytes() for path in files_that_leave(root)}
    said = (caplog.text + "".join(capfd.readouterr())).encode()
    for name in (
        "test_accuracy",
        "majority_accuracy",
        "test_auc",
        "test_f1",
        "test_loss",
        "calibration_error",
    ):
        for digits in (repr(exact[name]), f"{exact[name]:.6f}"):
            assert not [path for path, content in texts.items() if digits.encode() in content], name
            assert digits.encode() not in said
    cells, noisy = exact_cells(clinic), released_of(clinic).values
    assert np.abs(cells - noisy).min() > 0
    assert cells[:4].sum() == len(labels)


def files_that_leave(root: Path) -> Iterator[Path]:
    """All that a run makes but for the records themselves."""
    for path in root.rglob("*"):
        inside = path.relative_to(root).parts
        if path.is_file() and inside[0] not in ("datasets", "examples"):
            yield path


class Noon(datetime):
    """A clock that stands still, since each run has the times of its rows in its card."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> "Noon":
        return cls(2026, 1, 1, 12, tzinfo=tz)


def wandb_facts(content: bytes) -> set[str]:
    """What an offline file of W&B says of a run, without times, process ids, the machine and the live curve."""
    said = set[str]()
    for one in read_records(content):
        kind = one.WhichOneof("record_type")
        items = {"run": one.run.config.update, "summary": one.summary.update, "history": one.history.item}
        for item in items.get(kind, ()):
            name = item.key or "/".join(item.nested_key)
            if not name.startswith(("_", "live/")):
                said.add(f"{kind} {name}: {item.value_json}")
        if kind == "artifact":
            files = sorted((file.path, file.digest) for file in one.artifact.manifest.contents)
            said.add(f"{one.artifact.name} {one.artifact.metadata} {files}")
    return said


@pytest.mark.usefixtures("same_secrets")  # of which no file has the four bytes of a distance by chance
def test_what_leaves_depends_on_held_out_people_by_the_released_histogram_alone(
    clinic: Visits, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same key, noise and histogram, a run on half as many people and other ones leaves the same.

    Compared are what DVC has, the release's folder, the report, W&B's offline files, Prefect's artifacts and logs, the
    ledger, and the run's folder.
    """
    root, home, kept = clinic.place.root, clinic.place.home, clinic.place.root.parent / "kept"
    shown: list[Any] = []
    clinic.place.set("tracking", mode="offline")
    caplog.set_level(logging.DEBUG)
    monkeypatch.setattr(ledger_store, "datetime", Noon)
    monkeypatch.setattr(train, "count_held_out", lambda spec, *_: np.arange(spec.cells, dtype=np.float64))
    for maker in ("create_markdown_artifact", "create_table_artifact"):
        monkeypatch.setattr(deployed, maker, lambda *what, **named: shown.append((what, named)))

    def leave() -> dict[str, Any]:
        shown.clear()
        caplog.clear()
        clinic.train()
        clinic.finish()
        release(root / "artifacts", root / "release", key=None)
        with disable_run_logger():
            shown.append(deployed.publish(root))
        ours = ("algorithms", "data", "flows", "tasks")
        logged = [record for record in caplog.records if record.name.partition(".")[0] in ours]
        # what the live curve logs holds steps a second
        left: dict[str, Any] = {
            "prefect": list(shown),
            "log": [one.getMessage() for one in logged if one.name != "tasks.tracking.live"],
            "wandb": [wandb_facts(path.read_bytes()) for path in sorted(root.rglob("run-*.wandb"))],
            "wandb's report": re.sub(
                rb'"(__)?id(__)?": "\w+"', b"", next(root.glob(".wandb/report-*")).read_bytes()
            ),
            "wandb's copies": sorted(path.read_bytes() for path in root.glob(".wandb/data/**/staging/*")),
        }
        files = [path for path in files_that_leave(root) if ".wandb" not in path.parts]
        files += [path for path in home.rglob("*") if path.is_file()]
        return left | {str(path): path.read_bytes() for path in files}

    with killed_in(train, "run_training"):  # the key of the noise is drawn, and stays
        clinic.train()
    for folder in (root, home):
        shutil.copytree(folder, kept / folder.name, symlinks=True)
    one = leave()
    for folder in (root, home):
        shutil.rmtree(folder)
        shutil.copytree(kept / folder.name, folder, symlinks=True)
    os.chdir(root)
    for name, other in (("features", float(SECRET)), ("labels", 1)):
        file = root / f"datasets/prepared/test_{name}.npy"
        rows = np.load(file)
        np.save(file, np.full_like(rows, other)[: len(rows) // 2])
    two = leave()
    assert {"run", "summary", "history"} <= {
        fact.partition(" ")[0] for facts in one["wandb"] for fact in facts
    }
    assert one["wandb's copies"] and len(one["prefect"]) == 3
    assert {name for name in one | two if one.get(name) != two.get(name)} == set()
    for name, content in two.items():
        if isinstance(content, bytes):
            assert SECRET.encode() not in content, name
            assert np.float32(SECRET).tobytes() not in content, name


@pytest.mark.parametrize("where", ["settle", "finish"])
def test_a_killed_run_repeats_its_evaluation_bit_for_bit(where: str, clinic: Visits) -> None:
    owner: Any = store.RunAttempt if where == "finish" else ChargedRun
    left: list[bytes] = []

    def crashing(self: Any, *arguments: Any, **named: Any) -> Any:
        written = arguments[0] if where == "finish" else arguments[2]
        left.extend((written / name).read_bytes() for name in ("evaluation.json", "model.safetensors"))
        raise KeyboardInterrupt

    with killed_in(owner, where, crashing):
        clinic.train()
    clinic.train()
    artifacts = clinic.place.root / "artifacts"
    assert [(artifacts / name).read_bytes() for name in ("evaluation.json", "model.safetensors")] == left
    assert clinic.runs == 1


def test_an_error_of_the_evaluation_costs_the_metrics_alone(
    clinic: Visits, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(*_: Any) -> Any:
        raise ValueError(f"a person who lives {SECRET} km away")

    monkeypatch.setattr(train, "count_held_out", failing)
    caplog.set_level(logging.DEBUG)
    clinic.train()
    clinic.finish()
    assert "could not be evaluated (ValueError)" in caplog.text
    assert SECRET not in caplog.text
    root = clinic.place.root
    card = load(root / "artifacts/privacy_card.json")
    assert verify(card, root / "artifacts").passed
    assert not [name for name, passed, _ in verify_card.verify(root / "artifacts") if passed is False]
    assert text.holdout(card) == text.NOT_EVALUATED
    assert [name for name in read(clinic, "metrics.json") if name.startswith("test_")] == []
    assert (
        "held-out metrics",
        "the held-out records are private, and their evaluation failed after training, so there"
        " are no metrics",
    ) in run_summary(root)
    assert ": the held-out records are private, and their evaluation failed" in outcome_sentence(root)
    assert clinic.place.ledger.balance("visits").spent.epsilon == pytest.approx(1.0, rel=1e-3)
    assert read(clinic, "evaluation.json") == {}


def test_a_histogram_that_cannot_be_written_was_not_released(
    clinic: Visits, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, *_: Any, **__: Any) -> int:
        if self.name == "evaluation.json" and self.parent.name == "written":
            self.touch()
            raise OSError("no space left on device")
        return write(self, *_, **__)

    write = Path.write_text
    monkeypatch.setattr(Path, "write_text", full)
    clinic.train()
    clinic.finish()
    folder = clinic.place.root / "artifacts"
    card = load(folder / "privacy_card.json")
    assert verify(card, folder).passed
    assert set(card.evidence.files) == {"model.safetensors", "trace.parquet", "plan.json"}
    assert "evaluation" not in pd.read_parquet(folder / "trace.parquet")["kind"].tolist()


def test_where_records_are_not_counted_passes_follow_from_the_bound_of_the_card(
    clinic: Visits, monkeypatch: pytest.MonkeyPatch
) -> None:
    bounds = []

    def noting_the_bound(*arguments: Any, **named: Any) -> Any:
        bounds.append(named["compute"].max_number)
        return run_training(*arguments, **named)

    monkeypatch.setattr(train, "run_training", noting_the_bound)
    clinic.train()
    assert bounds == [2000]


@pytest.mark.parametrize("change", ["other records", "other description"])
def test_records_that_were_prepared_again_meanwhile_are_not_evaluated(
    change: str, clinic: Visits, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Others were not charged for, and a description with other weights or groups would state other bounds."""

    def prepared_meanwhile(*arguments: Any, **named: Any) -> Any:
        done = run_training(*arguments, **named)
        if change == "other records":
            (clinic.place.root / "datasets/prepared/contents").write_text("0" * 64 + "\n")
        else:
            other = replace(clinic.place.info, rows_per_user=3)
            (clinic.place.root / "datasets/prepared/public.json").write_text(other.to_json())
        return done

    monkeypatch.setattr(train, "run_training", prepared_meanwhile)
    monkeypatch.setattr(train, "count_held_out", lambda *_: pytest.fail("held-out records were read"))
    clinic.train()
    assert "could not be evaluated (DataRefusedError)" in caplog.text
    assert read(clinic, "evaluation.json") == {}


def test_held_out_records_are_read_after_the_reservation_and_never_again(
    clinic: Visits, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str | None] = []

    def watched(folder: Path) -> Any:
        rows = clinic.place.ledger.history("visits")
        seen.append(clinic.place.ledger.status(rows[-1].run_id))
        return load_held_out(folder)

    monkeypatch.setattr(train, "load_held_out", watched)
    clinic.train()
    assert seen == ["open"]

    def refusing(*_: Any, **__: Any) -> Any:
        raise AssertionError("held-out records were read")

    for name in ("load_held_out", "evaluate", "load_model"):
        monkeypatch.setattr(evaluate, name, refusing)
    clinic.finish()


def test_two_models_and_their_trainings_have_noise_of_their_own(clinic: Visits) -> None:
    residuals = []
    for seed in (0, 1):
        clinic.place.set("model", seed=seed)
        clinic.train()
        noisy = released_of(clinic)
        residuals.append((noisy.values - exact_cells(clinic)) / noisy.noise_std)
    assert np.abs(residuals[0] - residuals[1]).min() > 0
    assert abs(float(np.corrcoef(*residuals)[0, 1])) < 5 / math.sqrt(len(residuals[0]))


def test_public_held_out_records_after_private_ones_are_refused_and_the_reverse(reported: Visits) -> None:
    first = reported.place.receipt["run_id"]
    reported.prepare(CARD)
    made_with = f" as run {first} was made with"
    with refused_as("unlike_population", population="visits", differing="holdout", first=made_with):
        train.main()


def test_private_held_out_records_whose_exact_metrics_left_are_refused(visits: Visits) -> None:
    first = visits.train()
    visits.prepare(PRIVATE)
    made_with = f" as run {first} was made with"
    with refused_as("unlike_population", population="visits", differing="holdout", first=made_with):
        train.main()
    assert visits.runs == 1


def test_another_evaluation_than_the_runs_is_refused(reported: Visits) -> None:
    path = reported.place.root / "artifacts/evaluation.json"
    path.write_text(path.read_text().replace('"noise_std": ', '"noise_std": 1'))
    with refused_as("files_of_two_runs"):
        evaluate.main()


@pytest.mark.parametrize("by", [None, ["b", "a"]])
def test_a_plan_of_another_histogram_than_the_data_have_is_refused(
    by: list[str] | None, clinic: Visits
) -> None:
    """Without one, or with groups in another order, which the card may have had before."""
    path = clinic.place.root / "artifacts/plan.json"
    document, evaluation = PlanDocument.read(path), None
    if by is not None:
        assert document.evaluation is not None
        spec = histogram_for("two classes", 2, (("sex", tuple(by)),))
        planned = EvaluationPlan.from_document(document.evaluation)
        evaluation = replace(planned, spec=spec).to_document()
    path.write_text(document.model_copy(update={"evaluation": evaluation}).to_text())
    with refused_as("stale_plan", differing="held-out records"):
        train.main()
    assert "visits" not in clinic.place.ledger.populations()


def test_a_plan_that_states_less_than_its_evaluation_costs_is_refused(clinic: Visits) -> None:
    path = clinic.place.root / "artifacts/plan.json"
    document = json.loads(path.read_text())
    document["evaluation"]["epsilon"] /= 2
    path.write_text(json.dumps(document))
    with refused_as("plan_understates_evaluation", stated=document["evaluation"]["epsilon"]):
        train.main()
    assert "visits" not in clinic.place.ledger.populations()


def test_a_result_of_an_earlier_version_is_handed_out_without_an_evaluation(visits: Visits) -> None:
    first = visits.train()
    assert read(visits, "evaluation.json") == {}
    visits.finish()
    assert not (visits.place.home / "runs" / first / "result/evaluation.json").exists()
    assert visits.train() == first
    assert visits.runs == 1


def test_an_evaluation_that_would_raise_the_price_is_refused(clinic: Visits) -> None:
    with refused_as("evaluation_above_target", wanted=2.0, largest=1.0):
        clinic.place.set("privacy", evaluation={"epsilon": 2.0})


def test_an_evaluation_of_public_records_is_refused(visits: Visits) -> None:
    with refused_as("bad_keys", keys=("privacy.evaluation", "holdout")):
        visits.place.set("privacy", evaluation={"epsilon": 0.5})


REPLACED = {"name": "heavy_ball", "steps": 4, "momentum": 0.5, "noise": "gaussian"}


def of_replaced_records(clinic: Visits, **evaluation: float) -> None:
    card = re.sub(r"records: \{.*?\}", "records: {train: 901, test: 299}", PRIVATE)
    (clinic.place.root / "data/cards/visits.yaml").write_text(card)
    clinic.place.prepare("visits")
    path = clinic.place.root / "params.yaml"
    document = YAML(typ="safe", pure=True).load(path) | {"algorithm": REPLACED, "model": {"name": "logistic"}}
    document["privacy"] |= {"evaluation": evaluation}
    clinic.place.write(document)


def test_a_record_that_is_replaced_may_change_sides_so_both_are_paid_for(clinic: Visits) -> None:
    """Twice the change of a record that is added: epsilon 0.4 at delta 1e-5 needs noise 2 x 8.66."""
    of_replaced_records(clinic, epsilon=0.4)
    planned = Plan.from_document(plan_of(clinic))
    planned.check()
    assert planned.adjacency == "REPLACE_ONE"
    assert planned.evaluation is not None
    assert planned.evaluation.noise_multiplier == pytest.approx(17.33, rel=1e-2)
    training = epsilon(planned.schedule, 1e-5, adjacency=REPLACE_ONE)
    assert training < 0.99 < planned.cost.epsilon <= 1.0
    clinic.train()
    clinic.finish()
    folder = clinic.place.root / "artifacts"
    card = load(folder / "privacy_card.json")
    assert card.setting.epsilon == pytest.approx(planned.cost.epsilon)
    assert verify(card, folder).passed
    assert not [name for name, passed, _ in verify_card.verify(folder) if passed is False]
    assert "costs both together" in text.holdout(card)


def test_under_replace_one_the_evaluations_part_has_to_be_said(clinic: Visits) -> None:
    with refused_as("evaluation_needs_part", epsilon=1.0):
        of_replaced_records(clinic)


def test_an_evaluation_that_fails_under_replace_one_is_not_paid_for(
    clinic: Visits, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any) -> Any:
        raise ValueError

    of_replaced_records(clinic, epsilon=0.4)
    monkeypatch.setattr(train, "count_held_out", failing)
    clinic.train()
    clinic.finish()
    folder = clinic.place.root / "artifacts"
    card = load(folder / "privacy_card.json")
    assert verify(card, folder).passed
    assert not [name for name, passed, _ in verify_card.verify(folder) if passed is False]
    check_charged(card, clinic.place.ledger)


def test_the_plan_says_what_is_released_before_anything_is(clinic: Visits) -> None:
    stated = plan_of(clinic).evaluation
    assert stated is not None
    planned = EvaluationPlan.from_document(stated)
    assert planned.spec.kind == "two classes"
    assert planned.noise_multiplier == pytest.approx(3.7307, rel=5e-4)  # of epsilon 1 at delta 1e-5
    assert planned.noise_std == pytest.approx(3.7307 * planned.spec.sensitivity, rel=5e-4)
    with refused_as("evaluation_plan_edited"):
        EvaluationPlan.from_document(stated.model_copy(update={"noise_multiplier": 1.0}))


def test_a_search_scores_on_people_held_out_or_on_training_records_alone(clinic: Visits) -> None:
    base = YAML(typ="safe", pure=True).load(clinic.place.root / "params.yaml")
    base["privacy"]["evaluation"] = {"epsilon": 0.5}
    settings = {"epsilon": 1.0, "trials": {"mean": 2.0}, "space": {"algorithm.steps": [2, 3]}}
    with refused_as("bad_keys", keys=("objective.on",)):
        plan_search(Tuning.model_validate(settings), base, clinic.place.info)
    private = settings | {"objective": {"on": "private"}}
    plan = plan_search(Tuning.model_validate(private), base, clinic.place.info)
    file = clinic.place.root / "tune.yaml"
    clinic.place.set("data", dataset="visits")
    YAML(typ="safe", pure=True).dump(settings, file)
    assert load_here(clinic.place.root, file).objective.on == "held_out"  # where nothing is said
    assert not [document for document in plan.plans if document.evaluation or document.held_out]
    table, preview = search_table(clinic.place.root, file)
    rows = {cells[0]: cells[1] for cells in zip(*(column.cells for column in table.columns), strict=True)}
    assert re.fullmatch(
        r"epsilon 0\.9\d*; of a trial's accuracy: standard error 0\.\d+", rows["people held out"]
    )
    assert preview is not None and preview.plan.evaluation is not None


@pytest.mark.parametrize(
    ("test", "words", "drowned"),
    [
        (5000, "accuracy 0.0", None),
        (300, "accuracy 0.", "AUC, precision, recall, log loss; the run trains and does not show them"),
        (12, "noise drowns every one, with 12 records", None),
    ],
)
def test_a_plan_says_the_price_and_how_exact_metrics_will_be(
    test: int, words: str, drowned: str | None, clinic: Visits
) -> None:
    settings = params.load(clinic.place.root / "params.yaml", reads=params.GROUPS)
    plan = Plan.from_document(plan_of(clinic))
    preview = RunPreview(
        clinic.place.info, plan, (), Budget(10.0, 1e-4), None, 5, False, Composition(), held_out=test
    )
    table = cost_table(preview, settings)
    rows = dict(zip(*(column.cells for column in table.columns), strict=True))
    priced = r"private: one release at epsilon 0\.999\d*; the whole run costs 0\.999\d*"
    assert re.fullmatch(priced, rows["held-out records"])
    assert words in rows["standard errors of its metrics"]
    assert rows.get("drowned by noise") == drowned  # which is said once


def test_a_plan_says_errors_of_a_number_in_its_own_units_and_counts_people(clinic: Visits) -> None:
    """Without noise the mean absolute error's is that of a half-normal error of .205, of a range from -1 to 1."""
    settings = params.load(clinic.place.root / "params.yaml", reads=params.GROUPS)
    plan = Plan.from_document(plan_of(clinic))
    assert plan.evaluation is not None
    exact = replace(plan.evaluation, spec=histogram_for("number", 1), noise_multiplier=1e-6)
    info = replace(clinic.place.info, target=NumberTarget(bounds=(100.0, 300.0)), rows_per_user=4)
    preview = RunPreview(
        info,
        replace(plan, evaluation=exact),
        (),
        Budget(10.0, 1e-4),
        None,
        5,
        False,
        Composition(),
        held_out=2000,
    )
    rows = dict(zip(*(column.cells for column in cost_table(preview, settings).columns), strict=True))
    said = rows["standard errors of its metrics"]
    expected = 100.0 * 0.205 * math.sqrt(1 - 2 / math.pi) / math.sqrt(2000)
    assert float(re.search(r"MAE ([\d.]+)", said).group(1)) == pytest.approx(expected, rel=0.1)  # type: ignore[union-attr]
    assert "with 2,000 people of 4 records held out" in said


def test_all_rows_of_a_person_count_as_much_as_one(clinic: Visits) -> None:
    """A person with three rows moves the histogram by no more than its sensitivity."""
    info = replace(clinic.place.info, rows_per_user=3)
    spec, rng = histogram_for("two classes", 2), np.random.default_rng(0)
    rows = HeldOut(info, np.zeros((3, *info.input_shape), np.float32), np.ones(3, np.int64))
    assert rows.row_weight == 1 / 3
    for _ in range(50):
        scores = rng.dirichlet([1.0, 1.0], 3)
        cells = count(spec, scores, rows.test_labels, weights=np.full(3, rows.row_weight))
        assert np.linalg.norm(cells) <= spec.sensitivity * (1 + 1e-9)


def test_a_model_is_compared_with_another_on_the_same_people(reported: Visits) -> None:
    root = reported.place.root
    first = reported.place.receipt["run_id"]
    other = root / "other.safetensors"
    other.write_bytes((root / "artifacts/model.safetensors").read_bytes())
    reported.place.set("privacy", epsilon=9.0, evaluation={"compare_with": other.name})
    assert reported.train() != first
    reported.finish()
    released = released_of(reported)
    exact = [
        evaluate.metrics_of(file, root / "datasets/prepared")["test_accuracy"]
        for file in (root / "artifacts/model.safetensors", other)
    ]
    people = len(load_held_out(root / "datasets/prepared").test_labels)
    # The comparison's norm is that of the five tables, sqrt(5), and its sum of differences has 1 / sqrt(1.125) of it.
    noise = released.noise_std * math.sqrt(1.125) / math.sqrt(5) / people
    shown = read(reported, "metrics.json")["test_difference"]
    assert abs(shown["value"] - (exact[0] - exact[1])) < 5 * noise  # false alarms: 6e-7
    assert shown["high"] - shown["low"] > 2 * 1.9 * noise
    card = load(root / "artifacts/privacy_card.json")
    assert verify(card, root / "artifacts").passed
    assert not [name for name, passed, _ in verify_card.verify(root / "artifacts") if passed is False]


def test_another_model_than_planned_is_not_compared_with(reported: Visits) -> None:
    """The same noise for the difference to a second model would tell what the first difference was."""
    root = reported.place.root
    other = root / "other.safetensors"
    other.write_bytes((root / "artifacts/model.safetensors").read_bytes())
    reported.place.set("privacy", evaluation={"compare_with": other.name})
    set_temperature(other, 2.0)
    with refused_as("stale_plan", differing="held_out"):
        train.main()
    assert reported.runs == 1


def test_a_model_of_other_records_is_refused_before_anything_is_spent(reported: Visits) -> None:
    root = reported.place.root
    content = (root / "artifacts/model.safetensors").read_bytes()
    (root / "other.safetensors").write_bytes(
        content.replace(b'predicts\\": \\"class', b'predicts\\": \\"chaos')
    )
    reported.place.set("privacy", evaluation={"compare_with": "other.safetensors"})
    with refused_as("unlike_training", ModelRefusedError, differing="predicts"):
        train.main()
    assert reported.runs == 1


def test_metrics_are_given_by_declared_groups_with_their_differences(clinic: Visits) -> None:
    clinic.place.set("privacy", epsilon=9.0, evaluation={"by": ["insurance"]})
    clinic.train()
    clinic.finish()
    metrics = read(clinic, "metrics.json")
    groups = metrics["groups"]["insurance"]
    assert {name for one in groups for name in one["group"].split(", ")} == {"public", "private", "none"}
    assert set(groups[0]["accuracy"]) == {"value", "low", "high"}
    assert metrics["differences"]["insurance"][0]["first"] == groups[0]["group"]
    sizes = sum(one["size"]["value"] for one in groups)
    # Of the 1200 patients 915 have a declared insurance, and about a quarter of the patients is held out.
    assert sizes == pytest.approx(915 / 4, abs=60)
    assert "By insurance: " in (clinic.place.root / "artifacts/report.html").read_text()
    card = load(clinic.place.root / "artifacts/privacy_card.json")
    assert verify(card, clinic.place.root / "artifacts").passed


@pytest.mark.parametrize("columns", [["age"], ["shoe size"], ["reason", "reason"]])
def test_groups_of_a_column_without_declared_categories_are_refused(
    columns: list[str], clinic: Visits
) -> None:
    with refused_as("bad_keys", columns="insurance, reason", keys=("privacy.evaluation.by",)):
        clinic.place.set("privacy", evaluation={"by": columns})


def test_figures_have_released_counts_alone(reported: Visits) -> None:
    pairs = pd.read_csv(reported.place.root / "artifacts/plots/confusion.csv")
    released, exact = released_of(reported), exact_cells(reported)[:4].reshape(2, 2)
    sizes = released.spec.resolutions
    sums = np.concatenate([np.kron(np.eye(size), np.ones((1, sizes[-1] // size))) for size in sizes])
    tables = np.concatenate([released.view().tables[f"score x label, {size}"] for size in sizes])
    fine = np.linalg.lstsq(sums, tables, rcond=None)[0]
    noisy = fine.reshape(2, -1, 2).sum(axis=1)
    shown = pairs.pivot(index="predicted", columns="actual", values="count").to_numpy()
    assert shown.tolist() == np.rint(np.maximum(noisy, 0)).astype(int).tolist()
    assert np.abs(noisy - exact).min() > 1e-6  # before they are rounded, as any of them may be right then
    accuracy = read(reported, "metrics.json")["test_accuracy"]["value"]
    assert np.trace(noisy) / noisy.sum() == pytest.approx(accuracy, abs=1e-6)
    assert list(pairs.columns) == ["actual", "predicted", "count"]


def test_each_place_says_that_its_numbers_are_private(reported: Visits) -> None:
    root = reported.place.root
    rows = dict(run_summary(root))
    priced = r"private, epsilon (1|0\.999\d*)"  # as the noise that was found leaves of 1
    assert re.fullmatch(rf"{priced}; 95% intervals", rows["held-out metrics"])
    page = " ".join((root / "artifacts/report.html").read_text().split())
    assert re.search(rf"\({priced}\)", page)
    assert "95% interval" in page
    card = load(root / "artifacts/privacy_card.json")
    sent = summary(read(reported, "metrics.json"), card)
    assert (sent["test/held_out"], sent["test/epsilon"]) == ("private", pytest.approx(1.0, rel=1e-3))
    assert {"test/accuracy", "test/accuracy_low", "test/accuracy_high"} <= set(sent)


def out_of_memory(*_: Any) -> Any:
    raise MemoryError


@pytest.mark.parametrize("adjacency", ["add-or-remove-one", "replace-one"])
def test_a_run_that_was_settled_without_an_evaluation_makes_none_later(
    adjacency: str, clinic: Visits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its error may be gone when the run goes on, but the ledger knows of no such release."""
    if adjacency == "replace-one":
        of_replaced_records(clinic, epsilon=0.4)
    with monkeypatch.context() as patched, killed_in(store.RunAttempt, "finish"):
        patched.setattr(train, "count_held_out", out_of_memory)
        clinic.train()
    clinic.train()
    clinic.finish()
    assert read(clinic, "evaluation.json") == {}
    check_charged(load(clinic.place.root / "artifacts/privacy_card.json"), clinic.place.ledger)


def test_a_run_that_was_settled_with_an_evaluation_repeats_it_or_waits(
    clinic: Visits, monkeypatch: pytest.MonkeyPatch
) -> None:
    with killed_in(store.RunAttempt, "finish"):
        clinic.train()
    with monkeypatch.context() as patched:
        patched.setattr(train, "count_held_out", out_of_memory)
        with refused_as("evaluation_failed"):
            clinic.train()
    clinic.train()
    clinic.finish()
    assert set(read(clinic, "evaluation.json")) == {"spec", "values", "noise_std"}
    check_charged(load(clinic.place.root / "artifacts/privacy_card.json"), clinic.place.ledger)
    assert clinic.runs == 1


ADJACENCIES = ("add-or-remove-one", "replace-one")


@pytest.mark.parametrize(
    ("stated", "adjacency"),
    soak_but([(0.2, ADJACENCIES[0]), (None, ADJACENCIES[1])], product((0.2, None), ADJACENCIES)),
)
def test_a_card_that_states_less_for_the_people_held_out_does_not_verify(
    stated: float | None, adjacency: str, clinic: Visits
) -> None:
    if adjacency == "replace-one":
        of_replaced_records(clinic, epsilon=0.4)
    else:
        clinic.place.set("privacy", evaluation={"epsilon": 0.4})
    clinic.train()
    clinic.finish()
    path = clinic.place.root / "artifacts/privacy_card.json"
    document = json.loads(path.read_text())
    document["setting"]["evaluation_epsilon"] = stated
    if stated is None:
        del document["setting"]["evaluation_epsilon"]
    path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n")
    failed = {check.name for check in verify(load(path), path.parent).failures}
    theirs = {name for name, passed, _ in verify_card.verify(path) if passed is False}
    assert failed == theirs == {"signature", "epsilon of the people held out"}


@pytest.mark.parametrize("edit", [{"noise_std": 0.5}, {"spec": {}}])
def test_a_histogram_of_other_noise_or_cells_than_planned_does_not_verify(
    edit: dict[str, Any], reported: Visits
) -> None:
    folder = reported.place.root / "artifacts"
    document = read(reported, "evaluation.json") | edit
    (folder / "evaluation.json").write_text(json.dumps(document, sort_keys=True) + "\n")
    failed = {check.name for check in verify(load(folder / "privacy_card.json"), folder).failures}
    assert failed == {"evaluation.json", "evaluation"}


TARGETS: dict[str, tuple[dict[str, Any], list[str], str]] = {
    "three classes": ({"classes": ["a", "b", "c"]}, ["kind"], "test_accuracy"),
    "a number": ({"classes": [], "target": {"bounds": [0.0, 40.0]}}, ["kind"], "test_mae"),
    "labels": ({"classes": [], "target": {"labels": ["kind", "fresh"]}}, ["kind", "fresh"], "test_score"),
}


@pytest.mark.usefixtures("same_secrets")
@pytest.mark.parametrize("name", TARGETS)
def test_every_kind_of_target_is_evaluated_privately(
    name: str, workspace: Workspace, declared: Callable[..., None]
) -> None:
    predicts, columns, metric = TARGETS[name]
    draw = np.random.default_rng(0)
    answers = {"three classes": "abc", "a number": ["10", "20", "30"], "labels": ["0", "1", "1"]}[name]
    lines = [f"{price:.3f},{answers[at % 3]},{at % 2}" for at, price in enumerate(draw.random(300))]
    (workspace.root / "fruit.csv").write_text("\n".join(["price,kind,fresh", *lines]) + "\n")
    ignored = [] if "fresh" in columns else [{"name": "fresh", "kind": "ignored"}]
    reader = csv_of(number("price", 0, 1), *map(label, columns), *ignored)
    model = {"name": "softmax" if name == "three classes" else "linear"}
    declared("fruit.csv", model=model, reader=reader, holdout="private", **predicts)
    words = finish(workspace)
    assert "One noised histogram of the model's scores on the held-out records" in words
    page = (workspace.root / "artifacts/report.html").read_text()
    assert ("Right answers for each class" in page) is (name == "three classes")
    metrics = json.loads((workspace.root / "artifacts/metrics.json").read_text())
    assert metric in metrics
    assert (metrics[metric] is None) is (metric in metrics.get("not_shown", {}))
    if name == "a number" and metrics[metric] is not None:
        assert 1.0 < metrics[metric]["value"] < 40.0  # in the number's own units
    assert "held-out metrics" in dict(run_summary(workspace.root))


@pytest.mark.usefixtures("same_secrets")
def test_metrics_are_given_by_a_column_that_the_model_ignores(
    workspace: Workspace, declared: Callable[..., None]
) -> None:
    """The model is right wherever the region is north, and wrong everywhere else."""
    prices = np.random.default_rng(0).random(3000)
    rows = [
        (price, "north" if at % 2 else "south", "yes" if (price > 0.5) == bool(at % 2) else "no")
        for at, price in enumerate(prices)
    ]
    lines = [
        f"{price:.4f},{region},{kind}"
        for price, region, kind in rows
        for _ in range(5 if region == "north" else 1)
    ]
    (workspace.root / "fruit.csv").write_text("\n".join(["price,region,kind", *lines]) + "\n")
    unseen = {"name": "region", "kind": "ignored", "categories": ["north", "south"]}
    reader = csv_of(number("price", 0, 1), unseen, label("kind"))
    declared(
        "fruit.csv", model={"name": "softmax"}, reader=reader, holdout="private", records={"at_most": 9000}
    )
    workspace.set("privacy", epsilon=8.0, evaluation={"by": ["region"]})
    workspace.set("algorithm", steps=60, update={"learning_rate": 2.0})
    finish(workspace)
    groups = json.loads((workspace.root / "artifacts/metrics.json").read_text())["groups"]["region"]
    accuracy = {one["group"]: one["accuracy"]["value"] for one in groups}
    assert accuracy["north"] > 0.8 and accuracy["south"] < 0.2
    _, parameters = load_model(workspace.root / "artifacts/model.safetensors")
    assert {tensor.shape[-1] for tensor in parameters.values() if tensor.dim() == 2} == {1}  # the price alone

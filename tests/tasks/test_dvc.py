"""The stages under DVC: each lists all that decides its result and nothing else, and a real run keeps to it."""

import importlib
import re
import shlex
import subprocess
import sys
from collections.abc import Set
from functools import cache
from pathlib import Path
from typing import Any

import grimp
import pytest
from dvc.repo import Repo
from ruamel.yaml import YAML

from algorithms.features import FEATURES
from algorithms.methods import CATALOGUE
from tasks import calibrate
from tasks.refusals import PIPELINE
from tasks.runs.dvc_stages import STAGES
from tasks.runs.stage_main import refusals
from tests.support.checkout import PROJECT, Checkout

CANNOT_CHANGE_A_RESULT = {
    "algorithms.errors": "texts",
    "algorithms.privacy.ledger": "allows a run or refuses it",
    "data": "carries what datasets/prepared says",
    "tasks.calibrate": "for the stages after it: what it found is in plan.json",
    "tasks.config": "checks values that are listed themselves, and says where things are",
    "tasks.preflight": "refuses a run, asks a person, and says what it would cost",
    "tasks.runs": "resumes a run where it was, bit for bit the same, and describes it",
    "tasks.tracking": "tells others about the result",
}
WITHOUT_EFFECT = {"performance", "tracking", "ledger"}
"""Groups of params.yaml that never change a result, so that no stage depends on them."""
MAKES_THE_DATA = {"data"}
"""What says to the stages after it what datasets/prepared is, and in `prepare` itself decides that."""


@cache
def stages() -> dict[str, Any]:
    found: dict[str, Any] = YAML(typ="safe", pure=True).load(PROJECT / "dvc.yaml")["stages"]
    return found


def test_the_stages_are_those_that_the_flow_runs() -> None:
    assert tuple(stages()) == STAGES == ("prepare", "calibrate", "train", "evaluate", "report")


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_lists_the_parameters_that_it_reads(name: str) -> None:
    reads = importlib.import_module(f"tasks.{name}").READS
    wanted = set(reads) - WITHOUT_EFFECT
    assert set(stages()[name].get("params", [])) == wanted


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_lists_the_code_that_decides_its_result(name: str) -> None:
    # A method's own file is in plan.json, as a digest; what it imports is not.
    methods = {method.__module__ for method in CATALOGUE.values()} if name == "train" else set[str]()
    listed = set(stages()[name]["deps"]) | {_file(method) for method in methods}
    # Features are learned by an object that calibration makes.
    features = {kind.__module__ for kind in FEATURES.values()} if name == "train" else set[str]()
    roots = {f"tasks.{name}"} | methods | features
    irrelevant = CANNOT_CHANGE_A_RESULT.keys() - (MAKES_THE_DATA if name == "prepare" else set())
    missing = {module for module in _reached(roots, irrelevant) if not _listed(_file(module), listed)}
    assert not missing


def _reached(roots: set[str], irrelevant: Set[str]) -> set[str]:
    """The modules of ours that some modules import, directly or not, leaving out what cannot change a result."""
    graph, seen, todo = _imports(), set(), set(roots)
    while todo:
        module = todo.pop()
        if module in roots or not any(module == name or module.startswith(f"{name}.") for name in irrelevant):
            seen.add(module)
            todo |= graph.find_modules_directly_imported_by(module) - seen
    return seen


@cache
def _imports() -> grimp.ImportGraph:
    return grimp.build_graph("flows", "tasks", "algorithms", "data")


def _file(module: str) -> str:
    path = Path(module.replace(".", "/"))
    return str(path / "__init__.py") if (PROJECT / path).is_dir() else f"{path}.py"


def _listed(file: str, listed: set[str]) -> bool:
    return any(file == dep or file.startswith(f"{dep}/") for dep in listed)


@pytest.mark.parametrize("name", STAGES)
def test_every_dependency_exists_or_is_made_by_a_stage_before(name: str) -> None:
    made: set[str] = set()
    for earlier in STAGES[: STAGES.index(name)]:
        for kind in ("outs", "metrics", "plots"):
            made |= {
                next(iter(out)) if isinstance(out, dict) else out for out in stages()[earlier].get(kind, [])
            }
    for dep in stages()[name]["deps"]:
        assert _listed(dep, made) or (PROJECT / dep).exists(), dep


def due(checkout: Checkout) -> set[str]:
    """The stages that DVC would run."""
    with Repo(checkout.root) as repo:
        return {name.rsplit(":", 1)[-1] for name in repo.status()}


def test_a_run_leaves_its_files_and_is_then_done(checkout: Checkout) -> None:
    names = (
        "plan.json",
        "model.safetensors",
        "trace.parquet",
        "metrics.json",
        "privacy_card.json",
        "report.html",
    )
    for name in names:
        assert (checkout.root / "artifacts" / name).stat().st_size > 0
    before = checkout.ledger.head()
    assert "didn't change" in checkout.dvc("repro")
    assert due(checkout) == set()
    assert checkout.ledger.head() == before
    assert checkout.balance.spent.epsilon == pytest.approx(checkout.artifact("metrics.json")["epsilon"])


STATISTICS = {"scipy.stats", "scipy.signal", "dp_accounting.pld"}
"""What accounting needs for other releases than samples with Gaussian noise."""
OF_NO_NEED = {
    "prepare": {"torch", "pandas", "scipy", "sqlalchemy", "dp_accounting.dp_event"},
    "evaluate": {
        "pandas",
        "sklearn",
        "scipy",
        "sqlalchemy",
        "dp_accounting.dp_event",
        "matplotlib",
        "wandb",
    },
    "train": STATISTICS
    | {"sklearn", "prefect", "wandb", "matplotlib", "sympy", "torch._dynamo", "torch.utils._sympy"}
    | {"numpy.f2py", "rich", "data.new_records", "PIL"},
    "report": STATISTICS | {"torch", "sklearn", "prefect", "sqlalchemy", "numpy.f2py"},
}
"""Large packages, by stages that do without them on digits, whose held-out records are public."""


@pytest.mark.parametrize("stages", [("prepare", "report"), ("evaluate", "train")])
def test_a_stage_imports_no_more_than_it_needs(checkout: Checkout, stages: tuple[str, ...]) -> None:
    """Which is what most of a small run's time goes into. A stage needs no more than one before it in the process."""
    code = f"""import runpy, sys
for stage, names in {[(stage, OF_NO_NEED[stage]) for stage in stages]!r}:
    runpy.run_module('tasks.' + stage, run_name='__main__', alter_sys=True)
    print(stage, names & set(sys.modules))"""
    done = checkout.run(sys.executable, "-P", "-c", code)
    said = [line for line in done.stdout.splitlines() if line.startswith(stages)]
    assert (done.returncode, said) == (0, [f"{stage} set()" for stage in stages]), done.stderr


def test_a_stage_is_due_when_a_value_it_depends_on_changes(checkout: Checkout) -> None:
    for old, new in {
        "memory_mb: 1024": "memory_mb: 64",
        "device: auto": "device: cpu",
        "threads: null": "threads: 1",
        "checkpoint_seconds: 10.0": "checkpoint_seconds: 0.1",
        "mode: offline": "mode: disabled",
        "url: null": "url: sqlite:////srv/ledger.sqlite",
    }.items():
        checkout.set(old, new)
    assert due(checkout) == set()
    for old, new in {
        "epsilon: 3.0": "epsilon: 2.0",
        "seed: 0": "seed: 1",
        "momentum: 0.0": "momentum: 0.5",
    }.items():
        checkout.set(old, new)
        assert due(checkout) == {"calibrate", "train"}, new
        checkout.set(new, old)


def test_editing_what_can_change_a_result_makes_training_due_and_nothing_else_does(
    checkout: Checkout,
) -> None:
    def remark(file: str) -> None:
        with (checkout.root / file).open("a") as code:
            code.write("\n# a remark\n")

    for file in (
        "tasks/tracking/runs.py",
        "tasks/tracking/live.py",
        "algorithms/privacy/ledger/ledger.py",
        "algorithms/privacy/card/build.py",
        "tasks/report.py",
        "algorithms/methods/__init__.py",
    ):
        remark(file)
    (checkout.root / "algorithms" / "another.py").write_text("")
    (checkout.root / "algorithms" / "models" / "__pycache__").mkdir(exist_ok=True)
    (checkout.root / "algorithms" / "models" / "__pycache__" / "linear.cpython-311.pyc").write_bytes(b"")
    assert not {"train", "evaluate"} & due(checkout)
    remark("algorithms/privacy/barrier/barrier.py")
    assert "train" in due(checkout)


def test_a_result_that_was_paid_for_is_free_to_have_again(checkout: Checkout) -> None:
    before, model = checkout.ledger.head(), (checkout.root / "artifacts" / "model.safetensors").read_bytes()
    for path in ("artifacts/model.safetensors", "artifacts/metrics.json"):
        (checkout.root / path).unlink()
    checkout.dvc("repro")
    assert (checkout.root / "artifacts" / "model.safetensors").read_bytes() == model
    assert checkout.ledger.head() == before


def test_pull_in_a_clone_brings_results_and_no_records_and_spends_nothing(
    checkout: Checkout, tmp_path: Path
) -> None:
    checkout.dvc("remote", "add", "--quiet", "--default", "storage", "../remote")
    subprocess.run(["git", "add", "--all"], cwd=checkout.root, check=True)
    subprocess.run(["git", "commit", "--quiet", "--message", "a run"], cwd=checkout.root, check=True)
    checkout.dvc("push", "--quiet", "--run-cache")
    subprocess.run(["git", "clone", "--quiet", ".", "../clone"], cwd=checkout.root, check=True)
    records = {path.read_bytes() for path in checkout.root.glob("datasets/prepared/*.npy")}
    assert len(records) == 4
    for copies in checkout.root / ".dvc/cache", tmp_path / "remote":
        assert not records & {path.read_bytes() for path in copies.rglob("*") if path.is_file()}
    clone = Checkout(tmp_path / "clone", checkout.home)
    clone.dvc("pull", "--quiet")
    for name in ("model.safetensors", "privacy_card.json", "metrics.json"):
        assert (clone.root / "artifacts" / name).read_bytes() == (
            checkout.root / "artifacts" / name
        ).read_bytes()
    assert not (clone.root / "datasets").exists()
    before = clone.ledger.head()
    assert due(clone) == set(STAGES)  # the records that they read are missing
    clone.dvc("repro")
    assert due(clone) == set() and clone.ledger.head() == before
    assert {path.read_bytes() for path in clone.root.glob("datasets/prepared/*.npy")} == records


def test_metrics_plots_and_parameters_can_be_looked_at(checkout: Checkout) -> None:
    with Repo(checkout.root) as repo:
        metrics = repo.metrics.show()
    columns = {key: value for key, value in checkout.artifact("metrics.json").items() if key != "by_class"}
    assert metrics[""]["data"]["artifacts/metrics.json"]["data"] == columns
    checkout.dvc("plots", "show")
    page = (checkout.root / "dvc_plots" / "index.html").read_text()
    drawn = re.findall(r'<img[^>]*src="([^"]*)"', page)
    assert sorted(source.rsplit("_", 1)[-1] for source in drawn) == [
        *("class.png", "confusion.png", "epsilon.png", "noise.png", "risk.png")
    ]
    assert "http" not in page and "<script" not in page
    checkout.set("epsilon: 3.0", "epsilon: 2.0")
    with Repo(checkout.root) as repo:
        changes = repo.params.diff()["diff"]
    assert changes == {"params.yaml": {"privacy.epsilon": {"old": 3.0, "new": 2.0, "diff": -1.0}}}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of wandb_workspaces
def test_an_experiment_in_a_copy_is_charged_and_leaves_its_tracked_runs_in_the_checkout(
    checkout: Checkout,
) -> None:
    """DVC runs it in a copy, which it deletes."""
    spent = checkout.balance.spent.epsilon
    before = {path.name for path in checkout.root.glob(".wandb/wandb/offline-run-*")}
    subprocess.run(["git", "add", "dvc.lock"], cwd=checkout.root, check=True)
    subprocess.run(["git", "commit", "--quiet", "--message", "a run"], cwd=checkout.root, check=True)
    checkout.dvc("exp", "run", "--temp", "-S", "privacy.epsilon=0.5")
    assert 0.4 < checkout.balance.spent.epsilon - spent <= 0.5
    assert not list((checkout.root / ".dvc/tmp/exps").rglob("tmp*"))
    _, run_id = [row.run_id for row in checkout.ledger.history("digits") if row.kind == "reserve"]
    (tracked,) = {path.name for path in checkout.root.glob(".wandb/wandb/offline-run-*")} - before
    assert tracked.split("-", 3)[3] == run_id
    assert (checkout.root / f".wandb/report-{run_id}.json").is_file()
    page = (PROJECT / "docs/how-to/dvc.md").read_text()
    (shown,) = re.findall(r"^    dvc (exp show .*)$", page, flags=re.MULTILINE)
    heads = checkout.dvc(*shlex.split(shown), "--csv").splitlines()[0].split(",")
    results = {"test_accuracy", "test_loss", "test_auc", "test_f1", "calibration_error", "epsilon"}
    assert set(heads[4:]) <= results | {"privacy.epsilon"}
    assert {"test_loss", "privacy.epsilon"} <= set(heads)  # accuracies can be equal, and then have no column


def test_bad_parameters_are_refused_before_the_training(
    checkout: Checkout, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, plan = checkout.ledger.head(), checkout.artifact("plan.json")
    monkeypatch.chdir(checkout.root)
    for old, new, words in (
        ("expected_batch_size: 64", "expected_batch_size: 5000", "algorithm.expected_batch_size"),
        ("name: dp_sgd", "name: dp_magic", "no algorithm 'dp_magic'"),
        ("epsilon: 3.0", "epsilon: 0", "privacy.epsilon"),
        ("delta: 1e-5", "delta: 0.1", "set privacy.delta to at most"),
        ("clipping: l2", "clip: l2", "unknown key algorithm.clip"),
        ("name: softmax", "name: logistic", "2 classes"),
    ):
        checkout.set(old, new)
        with pytest.raises(refusals(), match=re.escape(words)), PIPELINE.wording_errors():
            calibrate.main()
        checkout.set(new, old)
    assert checkout.artifact("plan.json") == plan
    assert checkout.ledger.head() == before

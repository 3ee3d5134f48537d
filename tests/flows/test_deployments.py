"""What prefect.yaml and deploy/ deploy, against Prefect's own schemas, and a retraining's outcome as a state."""

import json
import logging
import re
import shutil
import subprocess
import sys
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import sqlalchemy as sa
from filelock import FileLock, Timeout
from prefect.exceptions import CrashedRun, FailedRun
from prefect.logging import disable_run_logger
from prefect.utilities.schema_tools import validate
from prefect.utilities.templating import apply_values
from ruamel.yaml import YAML
from typer.testing import CliRunner

from algorithms.errors import EmptySearchError, LedgerBrokenError
from algorithms.privacy.barrier.device import device_of
from flows import deployed, tune
from flows import scheduled as module
from flows.cli import runs
from flows.cli.main import app
from flows.deployed import BROKEN, REFUSED, flow_result
from tasks.config.params import ParamsRefusedError
from tasks.retraining import delivery
from tasks.retraining.delivery import Outcome
from tasks.runs.dvc_stages import StageFailedError
from tests.support.checkout import PROJECT
from tests.support.postgres import postgres_server as postgres_server

FILE: dict[str, Any] = YAML(typ="safe", pure=True).load(PROJECT / "prefect.yaml")
DEPLOYMENTS = {deployment["name"]: deployment for deployment in FILE["deployments"]}


def test_there_is_a_deployment_for_each_flow() -> None:
    assert set(DEPLOYMENTS) == {"train", "retrain", "compare", "report", "audit", "tune", "verify"}
    for deployment in DEPLOYMENTS.values():
        path, _, name = deployment["entrypoint"].partition(":")
        flow = getattr(import_module(path.removesuffix(".py").replace("/", ".")), name)
        assert flow.retries == 0
        assert set(deployment["parameters"]) <= set(flow.parameters.properties)


def test_the_how_to_page_names_them_all() -> None:
    page = (PROJECT / "docs/how-to/prefect.md").read_text(encoding="utf-8")
    assert {name for name in DEPLOYMENTS if f"/{name}`" not in page} == set()


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_none_piles_up_and_no_parameter_goes_unchecked(name: str) -> None:
    deployment = DEPLOYMENTS[name]
    assert deployment["concurrency_limit"] == {"limit": 1, "collision_strategy": "ENQUEUE"}
    assert deployment["tags"] == [deployed.TAG]
    assert deployment["enforce_parameter_schema"] is True
    assert deployment["work_pool"] == {"name": "local-pool"}
    assert [schedule["active"] for schedule in deployment.get("schedules", [])] == [False] * (
        name in ("retrain", "audit", "verify")
    )


SETTINGS = "name: m\ndataset: digits\nblocks: {policy: all}\nspread: {policy: equal, planned: 2}\n"


@pytest.mark.parametrize(
    ("kind", "left", "state"),
    [
        ("promoted", None, "Completed"),
        ("promoted", 3, "Completed"),
        ("kept", 2, module.FEW_LEFT),
        ("skipped", None, "Completed"),
        ("refused", None, REFUSED),
        ("broken", None, BROKEN),
        ("failed", None, "Failed"),
    ],
)
def test_an_outcome_becomes_a_state(
    kind: Any, left: int | None, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _checkout(tmp_path, monkeypatch)
    (tmp_path / "data").symlink_to(PROJECT / "data")
    monkeypatch.setattr(module, "get_run_logger", lambda: logging.getLogger("test"))
    monkeypatch.setattr(module, "deliver", lambda work: Outcome(kind, "how it went.", left))
    found = module.retrain.fn()
    assert found.name == state
    few = (
        " Without new blocks the caps allow 2 more retrainings of m, fewer than the 3 of warn_below. `epsilonflow"
        " ledger forecast digits --from retrain.yaml` says when each block ends. Bring new blocks, or let the owner"
        " raise the caps by `epsilonflow ledger cap digits --epsilon E --delta D`; after the last one the model in use"
        " stays, and nothing is spent."
    )
    assert found.message == f"how it went.{few if left == 2 else ''}"


@pytest.mark.parametrize(
    ("notes", "spent"), [([], "Nothing was spent."), (["Run a-1 is charged."], "Run a-1 is charged.")]
)
def test_a_refused_run_says_what_it_has_spent(notes: list[str], spent: str) -> None:
    def work() -> None:
        refusal = ParamsRefusedError("set delta to at most 1e-4.")
        for note in notes:
            refusal.add_note(note)
        raise refusal

    state = flow_result(work)
    assert (state.name, state.message) == (REFUSED, f"set delta to at most 1e-4. {spent}")  # type: ignore[union-attr]


def test_a_broken_ledger_has_a_state_of_its_own_whichever_flow_meets_it() -> None:
    def work() -> None:
        raise LedgerBrokenError("restore the ledger from a copy.")

    state = flow_result(work)
    assert (state.type, state.name, state.message) == ("FAILED", BROKEN, "restore the ledger from a copy.")  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("kind", "status"), [("promoted", 0), ("kept", 0), ("refused", 2), ("broken", 2), ("failed", 1)]
)
def test_without_prefect_an_outcome_becomes_an_exit_status(
    kind: Any, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _checkout(tmp_path, monkeypatch)
    monkeypatch.setattr(runs, "has_prefect_api", lambda: False)
    monkeypatch.setattr(delivery, "retrain", lambda work, now: Outcome(kind, "how it went."))
    done = CliRunner().invoke(app, ["retrain"])
    assert done.exit_code == status
    assert "how it went." in done.output


def _checkout(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("params.yaml", "dvc.yaml"):
        (folder / name).touch()
    (folder / ".dvc").mkdir()
    (folder / "retrain.yaml").write_text(SETTINGS + "warn_below: 3\n")
    monkeypatch.chdir(folder)


@pytest.mark.parametrize(
    ("deployment", "fails", "stays"), [("", False, 9), ("an-id", False, 1), ("an-id", True, 1)]
)
def test_what_a_deployment_is_started_with_is_for_that_run(
    deployment: str, fails: bool, stays: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _checkout(tmp_path, monkeypatch)
    params, during = tmp_path / "params.yaml", list[int]()
    document = YAML(typ="safe", pure=True).load(PROJECT / "params.yaml")
    document["model"]["seed"] = 1
    YAML(typ="safe", pure=True).dump(document, params)
    shutil.copytree(PROJECT / "data/cards", tmp_path / "data/cards")
    before = params.read_text()

    def seed() -> int:
        number: int = YAML(typ="safe", pure=True).load(params)["model"]["seed"]
        return number

    def stage(name: str, root: Path) -> str:
        during.append(seed())
        if fails:
            raise StageFailedError("it failed.")
        return "done"

    if deployment:
        monkeypatch.setenv("PREFECT__RUNTIME__DEPLOYMENT__ID", deployment)
    monkeypatch.setattr(deployed, "get_run_logger", lambda: logging.getLogger("test"))
    monkeypatch.setattr(deployed, "preview_run", MagicMock())
    monkeypatch.setattr(deployed, "stage_task", stage)
    monkeypatch.setattr(deployed, "publish", lambda root: [("data set", "digits")])
    monkeypatch.setattr(deployed, "outcome_sentence", lambda root: "dp_sgd on digits.")
    state: Any = deployed.pipeline.fn(seed=9)
    assert (state.type.value, state.data) == (
        ("FAILED", None) if fails else ("COMPLETED", [("data set", "digits")])
    )
    assert during == [9] * (1 if fails else 5)
    assert seed() == stays
    assert (params.read_text() == before) == (stays == 1)


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ("done", "trained dp_sgd on digits."),
        (
            "existing result, nothing charged: run r is identical.",
            "existing result, nothing charged; it is dp_sgd on digits.",
        ),
        (
            "nothing to do: existing result, nothing charged",
            "existing result, nothing charged; it is dp_sgd on digits.",
        ),
    ],
)
def test_a_run_that_charges_nothing_says_so(
    train: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That other stages have nothing to do, as where data is prepared already, is no word about the charge."""
    _checkout(tmp_path, monkeypatch)
    shutil.copy(PROJECT / "params.yaml", tmp_path)
    shutil.copytree(PROJECT / "data/cards", tmp_path / "data/cards")
    outcomes = {"prepare": "nothing to do: existing result, nothing charged", "train": train}
    monkeypatch.setattr(deployed, "preview_run", MagicMock())
    monkeypatch.setattr(deployed, "stage_task", lambda stage, root: outcomes.get(stage, "done"))
    monkeypatch.setattr(deployed, "publish", lambda root: [])
    monkeypatch.setattr(deployed, "outcome_sentence", lambda root: "dp_sgd on digits.")
    state: Any = deployed.pipeline.fn()
    assert state.message == message


@pytest.mark.parametrize("kind", ["pipeline", "tune"])
def test_params_are_read_while_no_other_run_changes_them(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a retraining does, which has the file while it trains."""
    _checkout(tmp_path, monkeypatch)
    shutil.copy(PROJECT / "params.yaml", tmp_path)
    shutil.copytree(PROJECT / "data/cards", tmp_path / "data/cards")

    def read(*_: object, **__: object) -> None:
        with pytest.raises(Timeout):
            FileLock(tmp_path / ".dvc/tmp/epsilonflow.lock").acquire(blocking=False)
        raise ParamsRefusedError("seen.")

    module, name = {"pipeline": (deployed, "preview_run"), "tune": (tune, "load_here")}[kind]
    monkeypatch.setattr(module, name, read)
    with disable_run_logger():
        flow: Any = {"pipeline": deployed.pipeline, "tune": tune.tune}[kind]
        state = flow.fn()
    assert state.message == "seen. Nothing was spent."


DEPLOY = PROJECT / "deploy"
KINDS = ("docker", "kubernetes")
VIEWS = files("prefect.server.api") / "collections_data/views/aggregate-worker-metadata.json"
WORKERS: dict[str, Any] = json.loads(VIEWS.read_text(encoding="utf-8"))


def _yaml(name: str) -> dict[str, Any]:
    found: dict[str, Any] = YAML(typ="safe", pure=True).load(DEPLOY / name)
    return found


def _template(kind: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DEPLOY / f"{kind}-pool.json").read_text(encoding="utf-8"))
    return found


def _keys(value: object, path: str = "") -> set[str]:
    if not isinstance(value, dict):
        return {path}
    return {path}.union(*(_keys(item, f"{path}/{name}") for name, item in value.items()))


@pytest.mark.parametrize("kind", KINDS)
def test_a_pool_is_that_of_prefect_with_more(kind: str) -> None:
    usual = WORKERS[f"prefect-{kind}"][kind]["default_base_job_configuration"]
    ours = _template(kind)
    assert _keys(usual["variables"]) <= _keys(ours["variables"])
    misplaced = re.compile("/template/spec/(parallelism|completions)$")  # of a job, in a pod's specification
    expected = {misplaced.sub(r"/\1", key) for key in _keys(usual["job_configuration"])}
    assert expected <= _keys(ours["job_configuration"])


@pytest.mark.parametrize("kind", KINDS)
def test_deployments_fit_their_pool_and_hold_no_secret(kind: str) -> None:
    schema, file = _template(kind)["variables"], _yaml(f"{kind}.yaml")
    assert {deployment["name"] for deployment in file["deployments"]} == {"train", "retrain", "verify"}
    for deployment in file["deployments"]:
        path, _, name = deployment["entrypoint"].partition(":")
        flow = getattr(import_module(path.removesuffix(".py").replace("/", ".")), name)
        assert set(deployment["parameters"]) <= set(flow.parameters.properties)
        assert deployment["concurrency_limit"] == {"limit": 1, "collision_strategy": "ENQUEUE"}
        assert deployment["tags"] == [deployed.TAG]
        variables = deployment["work_pool"]["job_variables"]
        assert set(variables) <= set(schema["properties"])
        validate(variables, schema)
        assert not any(schedule["active"] for schedule in deployment.get("schedules", []))
    text = (DEPLOY / f"{kind}.yaml").read_text(encoding="utf-8")
    assert "prefect.blocks" not in text  # whose value would be kept with the deployment
    assert re.search(r"://\w+@", text) and not re.search(r"://\w+:", text)


def _rendered_job() -> dict[str, Any]:
    """The job that a worker submits for a run of the first deployment."""
    template = _template("kubernetes")
    variables = _yaml("kubernetes.yaml")["deployments"][0]["work_pool"]["job_variables"]
    rules = template["variables"]["properties"].items()
    usual = {name: rule["default"] for name, rule in rules if "default" in rule}
    given = usual | variables | {"name": "run", "command": "prefect flow-run execute", "labels": {}}
    job: dict[str, Any] = apply_values(template["job_configuration"], given)["job_manifest"]
    assert "{{" not in json.dumps(job)
    assert (job["kind"], job["metadata"]["namespace"], job["spec"]["backoffLimit"]) == (
        "Job",
        "epsilonflow",
        0,
    )
    return job


def test_a_kubernetes_job_may_write_where_the_image_says_and_has_no_privileges() -> None:
    pod = _rendered_job()["spec"]["template"]["spec"]
    (container,), (init,) = pod["containers"], pod["initContainers"]
    mounted = {mount["name"] for mount in (*container["volumeMounts"], *init["volumeMounts"])}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    assert container["image"] == init["image"] == "epsilonflow:0.2.0"
    for each in (container, init):
        assert each["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
    assert pod["securityContext"]["runAsNonRoot"] and "runAsUser" not in pod["securityContext"]  # any user id
    writable = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
    image = (PROJECT / "Dockerfile").read_text(encoding="utf-8")
    (line,) = [line for line in image.splitlines() if line.startswith("# What it may write: ")]
    assert writable == set(re.findall(r"/[\w/]+", line.partition(".")[0]))
    (home,) = re.findall(r"^ENV HOME=(\S+)", image, flags=re.MULTILINE)
    assert home in writable
    assert container["envFrom"] == [{"secretRef": {"name": "epsilonflow", "optional": True}}]


def test_a_kubernetes_job_fits_the_schema_of_kubernetes() -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    job = _rendered_job()
    (container,) = job["spec"]["template"]["spec"]["containers"]
    container["args"] = container["args"].split()  # as the worker does with these two
    container["env"] = [{"name": name, "value": value} for name, value in container["env"].items()]
    kubernetes_validate.validate(job, "1.33", strict=True)
    container["securityContext"]["readOnlyRootFileSystem"] = True
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, "1.33", strict=True)


def test_a_password_file_of_kubernetes_is_copied_to_one_that_libpq_reads(
    postgres_server: sa.URL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under fsGroup a secret is a file of mode 0440, which libpq ignores, as others may read it."""
    shared, own = tmp_path / "shared", tmp_path / "own"
    shared.mkdir()
    own.mkdir()
    (shared / "pgpass").write_text(f"*:*:*:{postgres_server.username}:{postgres_server.password}\n")
    (shared / "pgpass").chmod(0o440)
    without_password = (
        postgres_server.set(password="").render_as_string(hide_password=False).replace(":@", "@")
    )

    def connect(file: Path) -> None:
        monkeypatch.setenv("PGPASSFILE", str(file))
        engine = sa.create_engine(without_password, poolclass=sa.NullPool)
        with engine.connect() as connection:
            assert connection.exec_driver_sql("SELECT 1").scalar() == 1

    with pytest.raises(sa.exc.OperationalError, match="no password supplied"):
        connect(shared / "pgpass")
    pod = _template("kubernetes")["job_configuration"]["job_manifest"]["spec"]["template"]["spec"]
    (init,) = pod["initContainers"]
    places = {
        mount["mountPath"]: tmp_path / name
        for mount, name in zip(init["volumeMounts"], ("shared", "own"), strict=True)
    }
    command = [
        next(
            (word.replace(path, str(place)) for path, place in places.items() if word.startswith(path)), word
        )
        for word in init["command"]
    ]
    subprocess.run(command, check=True)
    connect(own / "pgpass")


def test_a_search_that_drew_no_trial_does_not_say_that_nothing_was_spent() -> None:
    def work() -> None:
        raise EmptySearchError("search a-1 drew 0 trials. Its budget is spent.")

    state: Any = flow_result(work)
    assert (state.name, state.message) == ("Failed", "search a-1 drew 0 trials. Its budget is spent.")


def test_a_refusal_ends_without_a_traceback_and_an_error_with_one() -> None:
    """Prefect raises, and logs, a failed state that a flow returned."""
    deployed.flow_result(lambda: None)
    for name in ("prefect.flow_runs", "prefect.engine"):
        logger, kept = logging.getLogger(name), list[str]()
        handler = logging.Handler()
        handler.emit = lambda record, kept=kept: kept.append(record.getMessage())  # type: ignore[method-assign]
        logger.addHandler(handler)
        try:
            for error in (
                FailedRun("set delta to at most 1e-4."),
                CrashedRun("start it again."),
                ValueError("a bug"),
            ):
                logger.error(str(error), exc_info=error)
        finally:
            logger.removeHandler(handler)
        assert kept == ["a bug"]


@pytest.mark.parametrize(
    ("deployment", "name", "message"),
    [("an-id", "Stuck", "prefect worker start --pool local-pool"), ("", "Crashed", "the same command")],
)
def test_a_run_whose_output_nobody_reads_says_what_to_do(
    deployment: str, name: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker died, or the command's output was cut off; rich ends the process. Any other end of it stays one."""

    def orphaned() -> None:
        try:
            raise BrokenPipeError
        except BrokenPipeError:
            raise SystemExit(1)  # noqa: B904 - as rich does

    if deployment:
        monkeypatch.setenv("PREFECT__RUNTIME__DEPLOYMENT__ID", deployment)
    state: Any = deployed.flow_result(orphaned)
    assert (state.name, state.type.value) == (name, "CRASHED")
    assert message in state.message
    with pytest.raises(SystemExit):
        deployed.flow_result(lambda: sys.exit(1))


def test_a_flow_names_keys_of_params() -> None:
    state: Any = deployed.flow_result(lambda: device_of("abacus"))
    assert state.name == REFUSED and state.message.startswith("performance.device is abacus, but ")


def test_the_image_is_built_from_code_alone() -> None:
    text = (PROJECT / "Dockerfile").read_text(encoding="utf-8")
    # a second index could give another package of the same name
    assert not re.search(r"index-url|https?://", text)
    assert re.findall(r"^ARG .*INDEX.*", text, flags=re.MULTILINE) == ["ARG PIP_INDEX_URL"]
    lines = text.splitlines()
    (base,) = [line for line in lines if line.startswith("ARG BASE=")]
    assert re.fullmatch(r"ARG BASE=python:[\w.-]+@sha256:[0-9a-f]{64}", base)
    assert [line for line in lines if line.startswith("FROM")] == ["FROM ${BASE}"]
    copied = {word for line in lines if line.startswith("COPY") for word in line.split()[1:-1]}
    assert all((PROJECT / name).exists() for name in copied)
    ignored = (PROJECT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert {line[1:] for line in ignored if line.startswith("!")} == copied
    assert lines.index("USER 1000") > max(n for n, line in enumerate(lines) if line.startswith("RUN"))
    assert not [line for line in lines if re.search(r"(ARG|ENV).*(PASSWORD|KEY|TOKEN)", line)]
    (home,) = [line.split("=")[1].split()[0] for line in lines if "EPSILONFLOW_HOME=" in line]
    page = (PROJECT / "docs/how-to/prefect.md").read_text(encoding="utf-8")
    assert f":{home} " in page and '-v "$PWD:/checkout"' in page and "WORKDIR /checkout" in lines


def test_the_development_container_is_installed_by_make_and_has_its_home_in_a_volume() -> None:
    container = json.loads((PROJECT / ".devcontainer/devcontainer.json").read_text(encoding="utf-8"))
    makefile = (PROJECT / "Makefile").read_text(encoding="utf-8").replace("$(VENV)", ".venv")
    target = container["postCreateCommand"].rpartition("make ")[2]
    assert re.search(rf"^{re.escape(target)}:", makefile, flags=re.MULTILINE)
    python = container["customizations"]["vscode"]["settings"]["python.defaultInterpreterPath"]
    assert python == f"{Path(target).parent}/bin/python"
    image = (PROJECT / "Dockerfile").read_text(encoding="utf-8")
    assert f"ARG BASE=python:{container['image'].rpartition(':')[2].replace('-', '-slim-')}" in image
    (home,) = container["containerEnv"].values()
    (mount,) = container["mounts"]
    assert f"target={home},type=volume" in mount and f"chown vscode {home} " in container["postCreateCommand"]

"""The order of the steps, which the plain command and Prefect take alike, and params.yaml around them."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import pytest

import flows.pipeline
from flows.cli.running import StageOutput, listening
from flows.deployed import STAGE_LINES
from flows.pipeline import RunStage, run_pipeline, run_report, with_overrides
from tasks.config.overrides import ParamOverrides
from tasks.config.params import ParamsRefusedError
from tasks.runs.dvc_stages import STAGES, StageFailedError, StageRefusedError
from tests.support.checkout import PROJECT
from tests.support.refusals import refused_as


class Recorder:
    """Notes the stages that it is asked to run, and fails at one of them."""

    def __init__(self, fault: Exception | None = None) -> None:
        self.ran: list[str] = []
        self.fault = fault

    @contextmanager
    def stages(self, root: Path) -> Iterator[RunStage]:
        yield self._run

    def _run(self, stage: str) -> None:
        self.ran.append(stage)
        if self.fault is not None:
            raise self.fault

    def line(self, text: str) -> None: ...

    def result(self, root: Path) -> list[tuple[str, str]]:
        return [("stages", str(len(self.ran)))]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "params.yaml").write_text((PROJECT / "params.yaml").read_text())
    (tmp_path / "data").symlink_to(PROJECT / "data")
    (tmp_path / ".dvc/tmp").mkdir(parents=True)
    return tmp_path


def test_the_pipeline_runs_the_stages_of_dvc_in_their_order(root: Path) -> None:
    runner = Recorder()
    assert run_pipeline(root, ParamOverrides(), runner, keeps_overrides=True) == [("stages", "5")]
    assert tuple(runner.ran) == STAGES


def test_the_report_runs_the_last_two_where_there_is_a_model(root: Path) -> None:
    runner = Recorder()
    with refused_as("no_run"):
        run_report(root, runner)
    (root / "artifacts").mkdir()
    (root / "artifacts/model.safetensors").touch()
    run_report(root, runner)
    assert runner.ran == ["evaluate", "report"]


@pytest.mark.parametrize(
    ("fault", "keeps", "stays"),
    [
        (None, True, True),
        (None, False, False),
        (StageRefusedError("no."), True, False),
        (StageFailedError("no."), True, True),
        (StageFailedError("no."), False, False),
    ],
)
def test_overrides_stay_unless_a_stage_refuses_or_they_are_for_one_run(
    root: Path, fault: Exception | None, keeps: bool, stays: bool
) -> None:
    before = (root / "params.yaml").read_text()
    overrides = ParamOverrides(seed=77)
    if fault is None:
        run_pipeline(root, overrides, Recorder(), keeps_overrides=keeps)
    else:
        with pytest.raises(type(fault)), with_overrides(root, overrides, keeps=keeps):
            raise fault
    assert ((root / "params.yaml").read_text() != before) == stays


def test_overrides_of_a_killed_run_are_taken_back_by_the_next(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which a worker that was killed started, with overrides for that run alone."""
    before = (root / "params.yaml").read_text()
    monkeypatch.setattr(flows.pipeline, "restore_params", lambda _: None)  # nothing runs after a kill
    run_pipeline(root, ParamOverrides(seed=77), Recorder(), keeps_overrides=False)
    assert "seed: 77" in (root / "params.yaml").read_text()
    run_pipeline(root, ParamOverrides(), Recorder(), keeps_overrides=True)
    assert (root / "params.yaml").read_text() == before


@pytest.mark.parametrize(("fault", "keeps"), [(None, False), (StageRefusedError("no."), True)])
def test_what_a_person_writes_during_a_run_stays(root: Path, fault: Exception | None, keeps: bool) -> None:
    with suppress(StageRefusedError), with_overrides(root, ParamOverrides(seed=77), keeps=keeps):
        (root / "params.yaml").write_text("written: meanwhile\n")
        if fault is not None:
            raise fault
    assert (root / "params.yaml").read_text() == "written: meanwhile\n"


@pytest.mark.parametrize(("fault", "keeps"), [(None, False), (StageRefusedError("no."), True)])
def test_a_line_written_during_a_run_stays_without_the_runs_overrides(
    root: Path, fault: Exception | None, keeps: bool
) -> None:
    path = root / "params.yaml"
    path.write_text(before := path.read_text() + "# a note\n")
    with suppress(StageRefusedError), with_overrides(root, ParamOverrides(seed=77), keeps=keeps):
        path.write_text(path.read_text().replace("# a note", "# another note"))
        if fault is not None:
            raise fault
    assert path.read_text() == before.replace("# a note", "# another note")


@pytest.mark.parametrize(("line", "ran"), [("seed: 5", 2), ("seed: 77 # of mine", 5)])
@pytest.mark.parametrize("keeps", [True, False])
def test_a_run_is_not_planned_by_what_a_person_writes_meanwhile(
    root: Path, line: str, ran: int, keeps: bool
) -> None:
    """Such as another epsilon, which would be charged though nobody asked for it; a comment is in nobody's way."""
    path = root / "params.yaml"

    class Edited(Recorder):
        def _run(self, stage: str) -> None:
            if stage == "prepare":
                path.write_text(path.read_text().replace("seed: 77", line))
            super()._run(stage)

    runner = Edited()
    with nullcontext() if ran == 5 else refused_as("changed_params", ParamsRefusedError):
        run_pipeline(root, ParamOverrides(seed=77), runner, keeps_overrides=keeps)
    assert len(runner.ran) == ran
    assert line in path.read_text()


def test_the_command_shows_the_lines_of_a_flow_and_its_beginning_stages() -> None:
    steps, seen = StageOutput(verbose=True), list[str]()
    steps.line = seen.append  # type: ignore[method-assign]
    steps.begin = lambda stage: seen.append(f"begin {stage}")  # type: ignore[method-assign]
    with listening(steps):
        STAGE_LINES.info("", extra={"stage": "train"})
        STAGE_LINES.info("training ...", extra={"stage": "train"})
    STAGE_LINES.info("later", extra={"stage": "train"})
    assert seen == ["begin train", "training ..."]
    assert STAGE_LINES.level == logging.INFO and not STAGE_LINES.propagate

"""Which files of tests one process takes, beside each file alone, where several share the tests of a run."""

from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

PROJECT = Path(__file__).parents[2]
TOGETHER = {
    *("accelerator/test_runs", "algorithms/encoders/test_encoders", "algorithms/gradients/test_zoo"),
    *("algorithms/models/test_public_models", "algorithms/privacy/barrier/test_process_group"),
    *("algorithms/privacy/ledger/test_ledger_stores", "flows/cli/test_projects", "flows/cli/test_running"),
    *("tasks/comparing/test_work", "tasks/config/test_own_code", "tasks/runs/test_processes"),
    *(
        "tasks/runs/test_run_folders",
        "tasks/test_onnx_tables",
        "tasks/test_own_records",
        "tasks/test_predict",
    ),
    *("tasks/test_recalibration", "tasks/test_tables_as_cells", "tasks/test_targets"),
    "tasks/tuning/test_targets",
}
"""Files that import Hugging Face's libraries or PyTorch's exporter, or fork the server of `warm_processes`.

Each takes a process seconds, once.
"""


class FilesTogether(LoadFileScheduling):
    """A file goes to one process, and so do all of `TOGETHER`."""

    def __init__(self, config: pytest.Config, log: Producer | None = None) -> None:
        super().__init__(config, log)
        assert [name for name in TOGETHER if not (PROJECT / f"tests/{name}.py").exists()] == []

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return "together" if file.removeprefix("tests/").removesuffix(".py") in TOGETHER else file

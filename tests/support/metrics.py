"""The metrics that a run has written."""

import json
from typing import Any

from tests.support.own_records import declared as declared
from tests.support.workspace import Workspace


def metrics_of(workspace: Workspace) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((workspace.root / "artifacts/metrics.json").read_text())
    return found

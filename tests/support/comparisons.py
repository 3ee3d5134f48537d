"""A small comparison on digits, in a folder that has just what a comparison needs of a checkout."""

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tasks.comparing.definition import groups
from tasks.comparing.work import ComparisonWork, lock_comparison, plan_group, prepare_data, run_group, work_of
from tests.support.engines import engines_made_once

PROJECT = Path(__file__).parents[2]


def small(root: Path) -> Path:
    """A folder that passes for a checkout."""
    (root / ".dvc").mkdir(parents=True)
    (root / "comparisons").mkdir()
    shutil.copytree(PROJECT / "data" / "cards", root / "data" / "cards")
    for name in ("params.yaml", "dvc.yaml"):
        shutil.copyfile(PROJECT / name, root / name)
    return root


def document() -> dict[str, Any]:
    """Two methods, two epsilons, a few steps; accounted by RDP, which is quick."""
    return {
        "name": "tiny",
        "title": "A tiny comparison",
        "delta": 1e-5,
        "epsilons": [1.0, 4.0],
        "problems": [{"dataset": "digits", "model": "softmax"}],
        "methods": {
            "dp_sgd": {
                "label": "DP-SGD",
                "accountant": "rdp",
                "algorithm": {
                    "name": "dp_sgd",
                    "expected_batch_size": 64,
                    "steps": 5,
                    "update": {"learning_rate": 2.0},
                },
            },
            "plain": {
                "private": False,
                "algorithm": {"name": "non_private", "expected_batch_size": 64, "steps": 5},
            },
        },
        "record": {"objective": {"regularisation": 0.1}, "curves": True},
    }


def write(root: Path, content: dict[str, Any]) -> Path:
    """The comparison as a file of `root`; JSON is YAML."""
    path = root / "comparisons" / "tiny.yaml"
    path.write_text(json.dumps(content))
    return path


def run_here(root: Path, content: dict[str, Any], *, allow_code: Sequence[str] = ()) -> ComparisonWork:
    """Plans and runs the comparison in this process, without Prefect; equal models are inspected once."""
    work = work_of(write(root, content), root, allow_code=allow_code)
    with lock_comparison(work.workspace), engines_made_once():
        prepare_data(work)
        wanted = work.unfinished_trials(renew=False)
        for group in groups(wanted):
            assert plan_group(work.context, group) == []
        for group in groups(wanted):
            assert run_group(work.context, group) == []
    return work


if __name__ == "__main__":
    run_here(Path(sys.argv[1]), json.loads(sys.argv[2]))

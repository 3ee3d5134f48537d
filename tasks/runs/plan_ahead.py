"""The plan that a command made before its stages, which the calibrate stage hands out in place of computing it again.

To refuse a run before anything starts, a command plans it. The stage would plan the same, from the same values of
params.yaml and the same description of the data, in a process that first imports all that planning takes. So the
command names a file with its plan to the processes that it starts, and no other process looks for it. Training checks
the plan like any other: that it fits these values, and that it costs no less than its releases.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from algorithms.extension import is_own
from algorithms.privacy.documents import PlanDocument
from data import DatasetInfo
from data.card import DataRefusedError
from data.documents import Document, DocumentError, load_yaml
from data.files import write_text
from tasks.config import home
from tasks.runs.earlier_plans import may_have_earlier_plan

_VARIABLE = "EPSILONFLOW_PLAN_AHEAD"
_READS = ("privacy", "features", "algorithm", "model")


@contextmanager
def offering(root: Path, document: PlanDocument, info: DatasetInfo, text: str) -> Iterator[None]:
    """Within the block, processes that this one starts may take over its plan.

    root: the checkout. info: the description of the data that it was made for. text: that of params.yaml. A plan that
    depends on files or on code of the user's own, which may change until the stage runs, is not offered.
    """
    has_own_code = is_own(document.algorithm) or document.code.keys() != {"algorithm"}
    if has_own_code or document.model.files or (document.held_out or {}).get("compare_with"):
        yield
        return
    file = root.absolute() / ".dvc" / "tmp" / "epsilonflow-plan.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    offer = {"basis": _basis(info, load_yaml(text)), "plan": document.to_text(sort_keys=True)}
    write_text(file, json.dumps(offer))
    os.environ[_VARIABLE] = str(file)
    try:
        yield
    finally:
        del os.environ[_VARIABLE]
        file.unlink(missing_ok=True)


def read_offer(prepared: Path) -> bytes | None:
    """The plan that is offered to this process, if it is that of params.yaml and of the data in `prepared`.

    None also where an earlier run may have asked for the same, whose plan may be taken over instead.
    """
    if (file := os.environ.get(_VARIABLE)) is None:
        return None
    try:
        offer = json.loads(Path(file).read_text(encoding="utf-8"))
        info, params_document = (
            DatasetInfo.read(prepared),
            load_yaml(Path("params.yaml").read_text(encoding="utf-8")),
        )
        if may_have_earlier_plan(info, home()) or offer["basis"] != _basis(info, params_document):
            return None
        return str(offer["plan"]).encode()
    except (OSError, ValueError, KeyError, DocumentError, DataRefusedError):
        return None  # the stage says what is wrong


def _basis(info: DatasetInfo, params_document: Document) -> str:
    """A digest of all that decides a plan but software, which stays the same within a command."""
    words = [info.to_json(), *(json.dumps(params_document.get(group), sort_keys=True) for group in _READS)]
    return hashlib.sha256(json.dumps(words).encode()).hexdigest()

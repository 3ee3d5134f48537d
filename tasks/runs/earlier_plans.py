"""The plan of an earlier run that asked for the same: after an upgrade, nobody pays twice for what was paid for.

A run's id covers its whole plan, and ids stay what they are. Another version may find that less noise meets the same
target, or may have another source of the method; its plan would be that of another run. So calibration takes over the
plan of a run of this home that asked for the same, unless that run was forfeited or a person wants to spend again.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from algorithms.errors import RefusedError
from algorithms.extension import is_own
from algorithms.privacy.documents import PlanDocument
from algorithms.privacy.ledger import WHOLE_POPULATION
from algorithms.stated_names import without_folders
from data import DatasetInfo
from data.files import OWNER_KEY
from tasks.config import SPEND_AGAIN, has_consent, params
from tasks.runs import store

_COMPUTED_FIELDS = {"parameters", "notes"}
"""What calibration adds to the model's settings in a plan."""
_REQUESTED_FIELDS = {
    *("attack", "algorithm", "settings", "features", "dataset", "accountant"),
    *("target", "delta", "count_noise", "noise", "diagnostics", "held_out", "model"),
}


def request_in(document: PlanDocument) -> dict[str, JsonValue]:
    """What a plan's document asks for: without the noise that was found, and without the code of what is shipped."""
    names = {
        "algorithm": document.algorithm,
        "model": document.model.name,
        "features": document.features["name"],
    }
    request = document.model_dump(mode="json", include=_REQUESTED_FIELDS, exclude={"model": _COMPUTED_FIELDS})
    if document.attack is not None:
        del request["target"]
    return request | {
        "model": stated_model(request["model"]),
        "code": {part: digest for part, digest in document.code.items() if is_own(str(names[part]))},
    }


def stated_model(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a model as a plan and a card state them: its files without the folders of this machine.

    The plan has their checksums.
    """

    def without_local_folders(group: Mapping[str, Any]) -> dict[str, Any]:
        paths = {key for key in group if key in ("start", "checkpoint") or key.endswith("_file")}
        return {
            key: without_folders(value) if key in paths and isinstance(value, str) else value
            for key, value in group.items()
        }

    return without_local_folders(settings) | {"settings": without_local_folders(settings["settings"])}


def earlier_plan(
    document: PlanDocument,
    model: params.ModelParams,
    info: DatasetInfo,
    *,
    check: Callable[[PlanDocument], None],
    home: Path,
    prepared: Path,
) -> bytes | None:
    """The plan of a charged run here on the same records that asked for what `document` asks for; None without one.

    document: a new plan. model: its settings. check: raises RefusedError for a plan that training would refuse, such as
    one that no longer meets its target; it is not taken over. prepared: the folder of the records. Nor is a plan taken
    over where a run with the new one exists, as after somebody spent again. The plan is returned as it was written.
    """
    if not may_have_earlier_plan(info, home) or not prepared.is_dir():
        return None

    def id_of(content: str | bytes) -> str:
        blocks = info.blocks or (WHOLE_POPULATION,)
        return store.training_digest(json.loads(content), model, blocks, info, prepared, home=home)

    plans = dict(_plans(home / "runs"))
    if id_of(document.to_text()) in plans:
        return None
    for digest, content in plans.items():
        with suppress(KeyError, TypeError, ValueError, RefusedError):  # of another form, or refused today
            plan = PlanDocument.from_json(content, store.PLAN)
            if request_in(plan) == request_in(document) and id_of(content) == digest:
                check(plan)
                return content
    return None


def may_have_earlier_plan(info: DatasetInfo, home: Path) -> bool:
    """Whether runs are here, one of which may have asked for the same as a new run on these records."""
    if info.is_public or has_consent(SPEND_AGAIN) or not (home / OWNER_KEY).exists():
        return False
    return bool(_folders(home / "runs"))


def _folders(runs: Path) -> list[Path]:
    return [folder for folder in runs.glob("[!.]*-*") if folder.is_dir()]


def _plans(runs: Path) -> Iterator[tuple[str, bytes]]:
    """The digests and plans of the runs here, finished or not; those begun last come last, and so are the ones kept."""
    for folder in sorted(_folders(runs), key=lambda folder: folder.stat().st_ctime_ns):
        for file in (folder / store.PLAN, folder / "result" / store.PLAN):
            with suppress(OSError):
                yield folder.name.rpartition("-")[0], file.read_bytes()

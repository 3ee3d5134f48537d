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

from algorithms.errors import RefusedError
from algorithms.extension import is_own
from algorithms.privacy.ledger import WHOLE_POPULATION
from data import DatasetInfo
from data.files import OWNER_KEY, read_json
from tasks.config import SPEND_AGAIN, has_consent, params
from tasks.runs import store

_COMPUTED = ("parameters", "notes")
"""What calibration adds to the model's settings in a plan."""
_ASKED = (
    *("attack", "algorithm", "settings", "features", "dataset", "accountant"),
    *("target", "delta", "count_noise", "noise", "diagnostics", "held_out"),
)


def request_in(document: Mapping[str, Any]) -> dict[str, Any]:
    """What a plan's document asks for: without the noise that was found, and without the code of what is shipped."""
    own_parts = {name for name in ("algorithm", "model", "features") if is_own(_name_of(document, name))}
    return {name: document.get(name) for name in _ASKED if name != "target" or document["attack"] is None} | {
        "model": {key: value for key, value in document["model"].items() if key not in _COMPUTED},
        "code": {name: digest for name, digest in document["code"].items() if name in own_parts},
    }


def _name_of(document: Mapping[str, Any], part: str) -> str:
    named = document[part]
    return str(named["name"] if isinstance(named, Mapping) else named)


def earlier_plan(
    document: Mapping[str, Any],
    model: params.ModelParams,
    public: DatasetInfo,
    *,
    check: Callable[[Mapping[str, Any]], None],
    home: Path,
    prepared: Path,
) -> dict[str, Any] | None:
    """The plan of a charged run here on the same records that asked for what `document` asks for; None without one.

    document: a new plan. model: its settings. check: raises RefusedError for a plan that training would refuse, such as
    one that no longer meets its target; it is not taken over. prepared: the folder of the records. Nor is a plan taken
    over where a run with the new one exists, as after somebody spent again.
    """
    if (
        public.is_public
        or has_consent(SPEND_AGAIN)
        or not (home / OWNER_KEY).exists()
        or not prepared.is_dir()
    ):
        return None

    def id_of(plan: Mapping[str, Any]) -> str:
        blocks = public.blocks or (WHOLE_POPULATION,)
        return store.training_digest(plan, model, blocks, public, prepared, home=home)

    plans = dict(_plans(home / "runs"))
    if id_of(document) in plans:
        return None
    for digest, plan in plans.items():
        with suppress(KeyError, TypeError, ValueError, RefusedError):  # of another form, or refused today
            if request_in(plan) == request_in(document) and id_of(plan) == digest:
                check(plan)
                return plan
    return None


def _plans(runs: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The digests and plans of the runs here, finished or not; those begun last come last, and so are the ones kept."""
    folders = [folder for folder in runs.glob("[!.]*-*") if folder.is_dir()]
    for folder in sorted(folders, key=lambda folder: folder.stat().st_ctime_ns):
        for file in (folder / store.PLAN, folder / "result" / store.PLAN):
            with suppress(OSError, json.JSONDecodeError):
                yield folder.name.rpartition("-")[0], read_json(file)

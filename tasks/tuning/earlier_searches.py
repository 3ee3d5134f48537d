"""The plan of an earlier search that asked for the same: after an upgrade, nobody pays twice for what was paid for.

As `tasks.runs.earlier_plans` does for a run. The id of a search covers the plans of its trials, and another version may
make them with less noise. So a search keeps its plan beside its result; all of it is public.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from algorithms.errors import RefusedError
from algorithms.privacy.accounting.events import schedule_from_json, schedule_to_json
from algorithms.privacy.documents import PlanDocument
from data.documents import Document
from data.files import OWNER_KEY, read_json
from tasks.config import SPEND_AGAIN, has_consent
from tasks.runs.earlier_plans import request_in
from tasks.tuning.search_plan import SearchPlan
from tasks.tuning.settings import Tuning

SEARCH = "search.json"


def search_to_json(tuning: Tuning, plan: SearchPlan) -> str:
    """The content of `SEARCH`."""
    document = asdict(replace(plan, schedule=[], plans=())) | {
        "schedule": schedule_to_json(plan.schedule),
        "plans": [document.to_json() for document in plan.plans],
    }
    return json.dumps({"tuning": tuning.model_dump(), "plan": document})


def earlier_search_plan(
    tuning: Tuning,
    new: SearchPlan,
    *,
    digest_of: Callable[[SearchPlan], str],
    check: Callable[[SearchPlan], None],
    home: Path,
) -> SearchPlan | None:
    """The plan of a search here, on the same records, that asked for what `new` asks for; None without one.

    digest_of: the first part of the id of the search with a plan. check: raises RefusedError for a plan that does not
    hold today; it is not taken over.
    """
    if has_consent(SPEND_AGAIN) or not (home / OWNER_KEY).exists():
        return None
    searches = dict(_searches(home / "runs"))
    if digest_of(new) in searches:
        return None
    for digest, document in searches.items():
        with suppress(KeyError, TypeError, ValueError, RefusedError):  # of another form, or refused today
            schedule = schedule_from_json(document["plan"]["schedule"])
            plans = tuple(
                PlanDocument.from_json(json.dumps(trial), SEARCH) for trial in document["plan"]["plans"]
            )
            plan = SearchPlan(**{**document["plan"], "schedule": schedule, "plans": plans})
            is_same = document["tuning"] == json.loads(json.dumps(tuning.model_dump()))
            if is_same and _request_in(plan) == _request_in(new) and digest_of(plan) == digest:
                check(plan)
                return plan
    return None


def _request_in(plan: SearchPlan) -> list[Any]:
    """What the trials were asked to be, without the epsilon of each that was found."""
    requests = [request_in(document) | {"target": None} for document in plan.plans]
    settings = [
        {**document, "privacy": {**document["privacy"], "epsilon": None}} for document in plan.documents
    ]
    document: list[Any] = json.loads(json.dumps([requests, settings]))
    return document


def _searches(runs: Path) -> Iterator[tuple[str, Document]]:
    """The digests of the searches here, finished or not, and what they keep; those begun last come last."""
    files = [file for name in (SEARCH, f"result/{SEARCH}") for file in runs.glob(f"[!.]*-*/{name}")]
    for file in sorted(files, key=lambda file: file.stat().st_ctime_ns):
        with suppress(OSError, json.JSONDecodeError):
            yield file.relative_to(runs).parts[0].rpartition("-")[0], read_json(file)

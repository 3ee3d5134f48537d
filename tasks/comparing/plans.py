"""The plan of each cell, made before the first one trains and kept on disk: cells with equal inputs share one."""

import json
import math
from dataclasses import dataclass

from algorithms.algorithm import Plan
from algorithms.privacy.errors import Refused
from data import PublicDescription
from tasks import params
from tasks.calibrate import READS, plan_for
from tasks.comparing.cells import Cell, digest_of
from tasks.comparing.files import Place, write_json
from tasks.params import Params

_WITHOUT_NOISE = {"epsilon": 1.0, "delta": 1e-9, "accountant": "pld"}
"""The target of a method that adds no noise; nothing depends on it."""


@dataclass(frozen=True)
class Planned:
    """A cell's plan and the parameters it follows from."""

    plan: Plan
    settings: Params


def planned(place: Place, cell: Cell, public: PublicDescription, *, code: str) -> Planned:
    """The plan of a cell, from disk where one with equal inputs is there.

    public: the facts of the records that the cell trains on. code: a digest of the algorithms' source.
    Raises Refused, ParamsRefused or ModelRefused where the cell cannot run.
    """
    settings = _params(cell)
    inputs = [cell.settings, cell.model, cell.accountant, cell.epsilon, cell.delta]
    inputs += [extra for extra in (cell.model_settings, cell.features) if extra]
    path = place.plans / f"{digest_of([*inputs, json.loads(public.to_json()), code])}.json"
    if path.exists():
        return Planned(Plan.from_json(json.loads(path.read_text(encoding="utf-8"))), settings)
    plan = plan_for(settings, public)
    _check_is_as_declared(cell, plan)
    write_json(path, plan.to_json())
    return Planned(plan, settings)


def _params(cell: Cell) -> Params:
    target = {"epsilon": cell.epsilon, "delta": cell.delta, "accountant": cell.accountant}
    document = {
        "privacy": (_WITHOUT_NOISE if cell.epsilon is None else target) | {"noise": "seeded"},
        "features": cell.features,
        "algorithm": cell.settings,
        "model": cell.model_group,
    }
    return params.parse(document, reads=READS, name=f"methods.{cell.method}")


def _check_is_as_declared(cell: Cell, plan: Plan) -> None:
    is_private = math.isfinite(plan.cost.epsilon)
    if is_private and cell.epsilon is None:
        raise Refused(f"methods.{cell.method} adds noise, but says private: false; leave that out.")
    if not is_private and cell.epsilon is not None:
        raise Refused(f"methods.{cell.method} adds no noise; say private: false, and it runs once.")

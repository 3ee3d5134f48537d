"""What people import: `from epsilonflow import fit, DPSGD`. It gives the names of `algorithms`, on first use.

The packages `algorithms`, `data`, `flows` and `tasks` have common names, which a file of the user's own may have, too.
"""

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from algorithms import *  # noqa: F403


def find_shadowing(*packages: str) -> str | None:
    """A sentence that names a file which is found in place of one of our packages; None if there is none."""
    for name in packages:
        loaded = sys.modules.get(name)
        spec = loaded.__spec__ if loaded is not None else find_spec(name)
        locations = [] if spec is None else [*(spec.submodule_search_locations or [spec.origin or ""])]
        if Path(__file__).resolve().parents[1] / name not in [Path(folder).resolve() for folder in locations]:
            here = spec.origin or locations[0] if spec else "nothing"
            return (
                f"{here} is found in place of epsilonflow's package {name!r}; rename it, or take its folder off"
                " PYTHONPATH and start Python elsewhere or with -P."
            )
    return None


def __getattr__(name: str) -> Any:
    if (shadowing := find_shadowing("algorithms")) is not None:
        raise ImportError(shadowing)
    import algorithms

    return getattr(algorithms, name)


def __dir__() -> list[str]:
    import algorithms

    return dir(algorithms)

"""The algorithms by name."""

import json
from collections.abc import Mapping
from typing import Any

from algorithms.core.method import Algorithm, adapter
from algorithms.errors import RefusedError
from algorithms.extension import imported, is_own
from algorithms.methods.adaclip import AdaCliP
from algorithms.methods.adp_sgd import ADPSGD
from algorithms.methods.dp_agd import DPAGD
from algorithms.methods.dp_ftrl import DPFTRL
from algorithms.methods.dp_gd import DPGD
from algorithms.methods.dp_sgd import DPSGD
from algorithms.methods.dp_sgd_decay import DPSGDDecay
from algorithms.methods.dpis import DPIS
from algorithms.methods.majority import Majority
from algorithms.methods.matrix_factorisation import MatrixFactorisation
from algorithms.methods.momentum import HeavyBall, Nesterov
from algorithms.methods.non_private import LBFGS, NonPrivate
from algorithms.methods.norm_bound_sgd import NormBoundSGD
from algorithms.methods.older_analyses import SGDMA, SGDAdv
from algorithms.methods.perturbation import ObjectivePerturbation, OutputPerturbation
from algorithms.methods.priv_gene import PrivGene
from algorithms.methods.quantile_clipping import QuantileClipping

CATALOGUE: dict[str, type[Algorithm[Any]]] = {
    "dp_sgd": DPSGD,
    "dp_sgd_decay": DPSGDDecay,
    "quantile_clipping": QuantileClipping,
    "adaclip": AdaCliP,
    "adp_sgd": ADPSGD,
    "matrix_factorisation": MatrixFactorisation,
    "dp_ftrl": DPFTRL,
    "dp_gd": DPGD,
    "dp_agd": DPAGD,
    "dpis": DPIS,
    "heavy_ball": HeavyBall,
    "nesterov": Nesterov,
    "objective_perturbation": ObjectivePerturbation,
    "output_perturbation": OutputPerturbation,
    "priv_gene": PrivGene,
    "norm_bound_sgd": NormBoundSGD,
    "sgd_adv": SGDAdv,
    "sgd_ma": SGDMA,
    "majority": Majority,
    "lbfgs": LBFGS,
    "non_private": NonPrivate,
}
"""A new method is its file and its line here; the plan holds the file's digest, so a changed one trains again."""


def from_settings(settings: Mapping[str, Any]) -> Algorithm[Any]:
    """The algorithm that `settings` name under "name", with the other keys as its settings.

    A name `package.module:factory` is of a method that is not shipped: a dataclass of its settings, or a function of
    them. Raises RefusedError for an unknown name and pydantic's ValidationError for unknown, missing or impossible
    settings.
    """
    name = settings.get("name")
    own = {key: value for key, value in settings.items() if key != "name"}
    if isinstance(name, str) and is_own(name):
        return _not_shipped(name, own)
    if not isinstance(name, str) or name not in CATALOGUE:
        raise RefusedError(
            f"there is no algorithm {name!r}; choose one of {', '.join(CATALOGUE)},"
            " or name your own package.module:factory."
        )
    # By way of JSON, where strict checking still takes a mapping for a nested dataclass.
    return adapter(CATALOGUE[name]).validate_json(json.dumps(own))


def _not_shipped(name: str, own: Mapping[str, Any]) -> Algorithm[Any]:
    factory = imported(name, "the algorithm")
    if isinstance(factory, type):
        method: Algorithm[Any] = adapter(factory).validate_json(json.dumps(own))
    else:
        try:
            method = factory(**own)
        except TypeError as error:
            raise RefusedError(
                f"the algorithm {name!r} does not take these settings ({error}); change them."
            ) from None
    missing = [
        part for part in ("plan", "init", "step", "released") if not callable(getattr(method, part, None))
    ]
    if missing:
        raise RefusedError(
            f"the algorithm {name!r} has no {missing[0]}; give it plan, init, step and released."
        )
    return method

"""The methods, each of which reads like its paper, and their registry. Methods of one idea share a file.

They import core and the barrier's queries; no method imports another one's file.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import JsonValue

from algorithms.core.method import Algorithm
from algorithms.core.settings import from_registry
from algorithms.methods.adaptive_clipping import AdaCliP, QuantileClipping
from algorithms.methods.baselines import LBFGS, Majority, NonPrivate
from algorithms.methods.dp_agd import DPAGD
from algorithms.methods.dp_sgd import DPGD, DPSGD, SGDMA, NormBoundSGD, SGDAdv
from algorithms.methods.dpis import DPIS
from algorithms.methods.matrix_factorisation import DPFTRL, MatrixFactorisation
from algorithms.methods.momentum import HeavyBall, Nesterov
from algorithms.methods.noise_schedules import ADPSGD, DPSGDDecay
from algorithms.methods.perturbation import ObjectivePerturbation, OutputPerturbation
from algorithms.methods.priv_gene import PrivGene

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


def from_settings(settings: Mapping[str, JsonValue]) -> Algorithm[Any]:
    """The algorithm that `settings` name under "name", with the other keys as its settings; see `from_registry`."""
    return from_registry(settings, CATALOGUE, "algorithm", needs=("plan", "init", "step", "released"))

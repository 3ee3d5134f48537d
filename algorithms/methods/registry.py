"""The algorithms by name."""

from collections.abc import Mapping
from typing import Any

from algorithms.core.method import Algorithm, chosen
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
    """The algorithm that `settings` name under "name", with the other keys as its settings; see `chosen`."""
    return chosen(settings, CATALOGUE, "algorithm", needs=("plan", "init", "step", "released"))

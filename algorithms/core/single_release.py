"""What algorithms that ask one question share: their state, their plan's shape, and the minimum they ask for."""

from dataclasses import dataclass

from torch import Tensor

from algorithms.core.method import Plan, PublicInfo
from algorithms.errors import RefusedError
from algorithms.privacy.mechanisms.release import Minimum

RELATIVE_TOLERANCE = 1e-6
"""Length of the gradient at which a solver may stop, over the bound of one record's gradient."""

SMALLEST_CLIP_NORM = 1e-7
"""Of a record's gradient, over its public bound: below it rounding may keep a solver above its tolerance."""


@dataclass(frozen=True)
class Answered:
    """parameters: [d], the model's start, and after the only step what is published."""

    parameters: Tensor


class SingleRelease:
    """What methods share that ask once: they start at the model's start and publish the answer."""

    def init(self, parameters: Tensor, plan: Plan) -> Answered:
        """The model's start."""
        return Answered(parameters.clone())

    def released(self, state: Answered) -> Tensor:
        """What was answered, shape [d]."""
        return state.parameters


def private_minimum(public: PublicInfo, *, clip_norm: float, regularisation: float) -> Minimum:
    """The minimum of the clipped losses of a linear model with public bounds, ready for noise.

    regularisation: of the sum of losses. Raises RefusedError for more than two classes, for a loss with a kink and
    where no public bound exists, and for a clip norm that is lost in the rounding.
    """
    if public.classes != 2 or (public.inputs is not None and public.inputs.outputs != 1):
        raise RefusedError(
            "a minimum is released for linear models with one output, for 2 classes, and the model has another or the"
            f" data have {public.classes if public.classes > 1 else 'no'} classes; use the model 'logistic', or"
            " 'dp_gd'."
        )
    curvature = public.smoothness()
    if clip_norm < SMALLEST_CLIP_NORM * public.gradient_norm(2):
        raise RefusedError(
            f"a clip norm of {clip_norm:g} is below what the minimum can be found to, for gradients of up to"
            f" {public.gradient_norm(2):g}; set algorithm.clip_norm to 1 or so, or null for no clipping."
        )
    return Minimum(
        clip_norm=clip_norm,
        regularisation=regularisation,
        tolerance=RELATIVE_TOLERANCE * clip_norm,
        input_norm=0.0 if public.inputs is None else public.inputs.l2,
        curvature=curvature,
    )

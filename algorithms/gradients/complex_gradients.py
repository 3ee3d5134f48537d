"""Per-example gradients of real parameters of which a layer uses a complex weight.

Trained parameters are real, so a complex weight is computed from them. Its gradients are sums of outer products like
those of any weight, and each complex product is two real ones.
"""

import torch

from algorithms.gradients.block_gradients import BlockGrad
from algorithms.gradients.parameter_gradients import DenseGrad, LinearGrad, PerExample, SlicedGrad


def of_both_parts(gradient: PerExample) -> PerExample:
    """Gradients of a parameter [..., 2] from those of the complex tensor that views it."""
    if isinstance(gradient, SlicedGrad):
        parts = {(2 * start, 2 * stop): of_both_parts(part) for (start, stop), part in gradient.parts.items()}
        return SlicedGrad(parts, 2 * gradient.size)
    if not isinstance(gradient, LinearGrad | BlockGrad):
        return DenseGrad(torch.view_as_real(gradient.rows.resolve_conj()).flatten(start_dim=1))
    # e x = Re(e) x + Im(e) i x: a sequence twice as long, whose inputs have both parts of each number side by side.
    inputs, back = gradient.inputs.resolve_conj(), gradient.grad_outputs
    seen = (torch.view_as_real(part).flatten(start_dim=-2) for part in (inputs, 1j * inputs))
    return type(gradient)(torch.cat(list(seen), dim=-2), torch.cat([back.real, back.imag], dim=-2))


def of_real_part(gradient: PerExample) -> PerExample:
    """Gradients of a real parameter from those of the same numbers as complex ones."""
    if isinstance(gradient, LinearGrad | BlockGrad):
        inputs, back = gradient.inputs, gradient.grad_outputs
        return type(gradient)(
            torch.cat([inputs.real, -inputs.imag], dim=-2), torch.cat([back.real, back.imag], dim=-2)
        )
    return DenseGrad(gradient.rows.real)

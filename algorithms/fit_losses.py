"""The loss that `fit` is given as one loss per record: PyTorch's without reduction, and one's own.

A loss that mixes the records of a batch is refused: its own reduction is compared on made-up records.
"""

import copy
import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from algorithms.errors import RefusedError
from algorithms.gradients.randomness import same_randomness
from algorithms.models.bounds import CROSS_ENTROPY, LOGISTIC, LossBounds
from algorithms.models.model import ModelRefusedError
from algorithms.user_warnings import warn_user

LossFunction: TypeAlias = Callable[[Tensor, Tensor], Tensor]

_BY_INDEX = {"cross_entropy", "nll_loss", "multi_margin_loss", "multilabel_margin_loss"}
"""Losses whose targets are classes, as whole numbers."""
_BINARY = {"binary_cross_entropy", "binary_cross_entropy_with_logits"}
_FUNCTIONAL = {
    "CrossEntropyLoss": "cross_entropy",
    "NLLLoss": "nll_loss",
    "MultiMarginLoss": "multi_margin_loss",
    "MultiLabelMarginLoss": "multilabel_margin_loss",
    "BCELoss": "binary_cross_entropy",
    "BCEWithLogitsLoss": "binary_cross_entropy_with_logits",
}
_REDUCTIONS = ("none", "mean", "sum", "batchmean")
_BOUNDS = {"cross_entropy": CROSS_ENTROPY, "binary_cross_entropy_with_logits": LOGISTIC}


def losses_of_records(
    loss: object,
    labels: NDArray[Any],
    outputs: tuple[int, ...],
    *,
    is_flat: bool,
    is_column: bool,
) -> tuple[LossFunction, LossBounds | None, int | None]:
    """The per-record loss [batch], its public bounds, and the class of ignored targets.

    Args:
        loss: Of the user, or its name.
        labels: The targets of all records, [n, ...].
        outputs: The shape of a record's outputs.
        is_flat: Whether the module gives [batch], as one's own loss takes it.
        is_column: Whether labels [n] were given as [n, 1], which one's own loss then gets.

    Raises:
        RefusedError: For a loss that mixes records, and for one that does not take such outputs and targets.
    """
    name, loss_of_each, reduction = without_reduction(loss)
    _check_arguments(loss_of_each)
    if isinstance(loss, nn.Module) and any(part.requires_grad for part in loss.parameters()):
        raise RefusedError(
            "the loss has parameters of its own, and only those of the model are trained; move them into the model, or"
            " freeze them by loss.requires_grad_(False)."
        )
    if not callable(loss_of_each):
        raise RefusedError(
            f"there is no loss {loss if isinstance(loss, str) else type(loss)!r}; name one of torch.nn.functional, such"
            " as 'cross_entropy'."
        )
    by_index, is_own = name in _BY_INDEX, name == ""
    is_real, shape = labels.dtype.kind == "f", labels.shape[1:]
    as_real = is_real or not (is_own or by_index)
    if not is_own:
        _check_targets(name, labels, outputs, is_real=is_real, as_real=as_real)
    keeps = is_own and is_real and not is_flat and _takes_column(loss_of_each, outputs, shape)
    none = -1 if name == "multilabel_margin_loss" else -100  # marks the end of a record's classes
    ignored: int | None = getattr(loss, "ignore_index", none) if by_index else None

    def match_shapes(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        if is_column and is_own:
            targets = targets[:, None]
        if is_flat and is_own:
            outputs = outputs[:, 0]
        if as_real:
            targets = targets.to(outputs.dtype)
            # [batch, 1] and [batch] would broadcast to [batch, batch]
            is_one = outputs.shape[-1] == 1 and outputs.dim() == targets.dim() + 1
            outputs = outputs[..., 0] if is_one and not keeps else outputs
        elif by_index and targets.dim() > 1 and outputs.shape[2:] != targets.shape[1:]:
            outputs = outputs.movedim(-1, 1)  # where PyTorch's losses expect the classes
        if name == "binary_cross_entropy":  # it raises an error for NaN, where a record has to count as zero
            outputs = outputs.nan_to_num(0.5)
        return outputs, targets

    def losses(outputs: Tensor, targets: Tensor) -> Tensor:
        return _reduce_per_record(loss_of_each(*match_shapes(outputs, targets)), targets, reduction, ignored)

    # A mean may divide by weights of the whole batch, which the values without reduction do not show.
    if reduction not in (None, "none"):
        reduced: Any = getattr(functional, name) if reduction == "" else loss
        _check_reduction(
            lambda *pair: reduced(*match_shapes(*pair)),
            losses,
            _synthetic_pair(outputs, shape, by_class=not as_real, ignored=ignored),
            is_sum=reduction == "sum",
        )
    return losses, _BOUNDS.get(name) if reduction == "" or _is_default(loss) else None, ignored


def _is_default(loss: object) -> bool:
    """Whether a loss of PyTorch, as a module, computes what its function does with no more than two arguments."""
    kind = type(loss)
    if kind not in (nn.CrossEntropyLoss, nn.BCEWithLogitsLoss) or getattr(loss, "reduction", "") == "sum":
        return False
    usual: nn.Module = kind()
    names = ("weight", "pos_weight", "label_smoothing", "ignore_index")
    return all(getattr(loss, name, None) == getattr(usual, name, None) for name in names)


def _reduce_per_record(values: object, targets: Tensor, reduction: str | None, ignored: int | None) -> Tensor:
    """One loss per record, [batch], of a loss's values [batch, ...] for the targets of each record.

    Their sum or mean, by the loss's reduction; the mean is over the targets that are not `ignored`.
    """
    if not isinstance(values, Tensor):
        raise ModelRefusedError(
            f"the loss gives a {type(values).__name__}, but it has to give a tensor with a number for each record;"
            " compute it in PyTorch alone, without float() or .item(), and return it."
        )
    if reduction is None or values.dim() <= 1:
        return values
    values = values.flatten(1)
    if reduction in ("sum", "batchmean"):
        return values.sum(-1)
    if ignored is None:
        return values.mean(-1)
    return values.sum(-1) / targets.flatten(1).ne(ignored).sum(-1).clamp(min=1)


_COMPARED_RECORDS = 4
"""Made-up records on which a loss is compared with its own reduction."""


def _synthetic_pair(
    outputs: tuple[int, ...], shape: tuple[int, ...], *, by_class: bool, ignored: int | None
) -> tuple[Tensor, Tensor]:
    """Outputs between 0 and 1, with which all losses of PyTorch can be computed, and targets of each class in turn.

    ignored: left out of records of several targets, each of which has a mean over those of its targets that count.
    """
    draw = torch.Generator().manual_seed(0)
    outputs_drawn = torch.rand(_COMPARED_RECORDS, *outputs, generator=draw) * 0.8 + 0.1
    if not by_class:
        return outputs_drawn, torch.rand(_COMPARED_RECORDS, *shape, generator=draw)
    classes = max(2, class_count(outputs, shape))
    allowed = torch.tensor([index for index in range(classes) if not shape or index != ignored])
    order = torch.arange(_COMPARED_RECORDS * math.prod(shape)) % len(allowed)
    return outputs_drawn, allowed[order].view(_COMPARED_RECORDS, *shape)


def _check_reduction(
    reduced: Callable[[Tensor, Tensor], Any],
    losses: LossFunction,
    pair: tuple[Tensor, Tensor],
    *,
    is_sum: bool,
) -> None:
    """Raises RefusedError if a loss's own value is not the mean, or the sum, of the losses of the records."""
    try:
        with torch.no_grad(), same_randomness():
            value, each = reduced(*pair), losses(*pair)
            differs = value.dim() == 0 and each.dim() == 1
            differs &= not torch.allclose(value, each.sum() if is_sum else each.mean(), rtol=1e-4, atol=1e-6)
    except Exception:  # it is called on made-up records of the model once more, where errors are put in words
        return
    if differs:
        raise RefusedError(
            "the loss divides by what the records of a batch hold together, such as the weights of their classes or how"
            " many targets are not ignored, and so mixes records; give it reduction='none', with which each record's"
            " loss counts as it is, and the batch's is divided by its size."
        )


def class_count(outputs: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """The number of classes, given the shapes of a record's outputs and targets; PyTorch puts classes first."""
    return outputs[0] if outputs[1:] == shape else outputs[-1]


def takes_classes(loss: object) -> bool:
    """Whether whole targets stay whole for a loss; PyTorch's other losses take them as real numbers."""
    return without_reduction(loss)[0] in {"", *_BY_INDEX, *_BINARY}


def warn_of_probabilities(loss: object, outputs: Tensor) -> None:
    """Warn if outputs for made-up records, [2, outputs, ...], are what the loss makes of scores by itself."""
    name, values = without_reduction(loss)[0], outputs.detach().double()
    is_share = bool(((values >= 0) & (values <= 1)).all())
    sums_to_one = torch.allclose(values.sum(-1), torch.ones_like(values[..., 0]), rtol=0, atol=1e-5)
    if is_share and name == "cross_entropy" and values.shape[-1] > 1 and sums_to_one:
        function = "softmax"
    elif is_share and name == "binary_cross_entropy_with_logits":
        function = "sigmoid"
    else:
        return
    warn_user(
        f"the model's outputs are probabilities, of which {name} takes the {function} once more, so it hardly learns;"
        f" take the last {function} out of the model.",
    )


def _check_targets(
    name: str, labels: NDArray[Any], outputs: tuple[int, ...], *, is_real: bool, as_real: bool
) -> None:
    """Raises RefusedError if a loss of PyTorch does not take such targets beside a record's outputs."""
    if name in _BINARY and is_real and (labels.min() < 0 or labels.max() > 1):
        raise RefusedError(
            f"y holds numbers below 0 or above 1, and the loss {name} takes 0 to 1; scale them."
        )
    shape = labels.shape[1:]
    if name == "cross_entropy" and not is_real and shape == outputs:
        raise RefusedError(
            "y holds whole numbers in the shape of the model's outputs; give classes, such as y.argmax(1), or real"
            " numbers as the probability of each class, such as y.astype(float)."
        )
    if name in _BY_INDEX and not is_real and shape and shape == outputs[1:] == outputs[:-1]:
        raise RefusedError(
            f"the model gives outputs {[*outputs]} for targets {[*shape]} of a record, where the first or the last"
            " dimension could be that of the classes; give a loss of your own, such as lambda outputs, targets:"
            f" {name}(outputs.movedim(-1, 1), targets, reduction='none').mean(1) for the last one."
        )
    if not as_real or shape in (outputs, outputs[:-1] if outputs[-1] == 1 else outputs):
        return
    if name in _BY_INDEX and is_real:
        raise RefusedError(
            f"y holds real numbers, and the loss {name} takes classes; give them as whole numbers from 0, such as"
            " y.astype(int)."
        )
    shapes = (", ".join(map(str, ("batch", *part))) for part in (outputs, shape))
    raise RefusedError(
        "the model gives outputs [{}] and y has targets [{}], which".format(*shapes)
        + f" the loss {name} compares one by one; let the model give outputs of the targets' shape."
    )


def _takes_column(loss: LossFunction, outputs: tuple[int, ...], targets: tuple[int, ...]) -> bool:
    """Whether a loss takes outputs [batch, 1] for targets [batch], given these shapes of a record's."""
    if outputs != (*targets, 1):
        return False
    try:
        return loss(torch.zeros(3, *outputs), torch.zeros(3, *targets)).shape == (3,)
    except Exception:  # it expects [batch]
        return False


def _check_arguments(loss: Any) -> None:
    """Raises RefusedError if a loss takes more than outputs and targets."""
    try:
        taken = inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss).parameters.values()
    except (TypeError, ValueError):  # it states no arguments
        return
    needed = [
        parameter.name
        for parameter in taken
        if parameter.default is parameter.empty and parameter.kind in _BY_PLACE
    ]
    if len(needed) > 2:
        raise RefusedError(
            f"the loss takes {', '.join(needed)}, and it is called with outputs and targets alone; give one of your own"
            " that takes the others from the outputs, such as lambda outputs, targets:"
            " torch.nn.functional.gaussian_nll_loss(outputs[:, 0], targets, outputs[:, 1].exp(), reduction='none')."
        )


_BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def without_reduction(loss: object) -> tuple[str, Any, str | None]:
    """A loss as (its functional name, the loss of each record, its reduction).

    The name is "" if the loss is not PyTorch's, and the reduction None if it has none and "" if it is the default.

    Raises RefusedError for a class, TorchScript, and a reduction that PyTorch does not have.
    """
    if isinstance(loss, type):
        raise RefusedError(
            f"the loss is the class {loss.__name__}; give an instance, such as {loss.__name__}()."
        )
    if isinstance(loss, torch.jit.ScriptModule):
        raise RefusedError("the loss is TorchScript; give the torch.nn.Module that it was made from.")
    if isinstance(loss, nn.Module):
        if not hasattr(loss, "reduction"):
            return "", loss, None
        unreduced = copy.deepcopy(loss)
        unreduced.reduction = "none"  # type: ignore[assignment]
        bases = [of.__name__ for of in type(loss).__mro__ if of.__module__ == "torch.nn.modules.loss"]
        kind = next((base for base in bases if not base.startswith("_")), "")
        reductions = _REDUCTIONS if kind in ("", "KLDivLoss") else _REDUCTIONS[:3]
        if loss.reduction not in reductions:
            raise RefusedError(
                f"the loss has the reduction {loss.reduction!r}; give it one of {', '.join(reductions)}."
            )
        name = next((_FUNCTIONAL[base] for base in bases if base in _FUNCTIONAL), kind)
        return name, unreduced, str(loss.reduction)
    name = loss if isinstance(loss, str) else getattr(loss, "__name__", "")
    function = getattr(functional, name, None) if name else None
    if function is None or not (isinstance(loss, str) or function is loss):
        return "", loss, None
    try:
        has_reduction = "reduction" in inspect.signature(function).parameters
    except (TypeError, ValueError):
        has_reduction = False
    return (name, partial(function, reduction="none"), "") if has_reduction else ("", loss, None)

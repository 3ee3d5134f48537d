"""What a model raises on made-up records, as one sentence: where it was raised, and what to do."""

import inspect
import re
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from algorithms.gradients.determinism import layer_in_backward_pass, refusal_of, unrepeatable_kernel
from algorithms.gradients.errors import ProcessLostError, RecordsNotIndependentError, UnsupportedModelError
from algorithms.gradients.model import PerExampleModel
from algorithms.gradients.synthetic_inputs import InputSpec

_LIBRARY_FOLDERS = (Path(torch.__file__).parent, Path(__file__).parent)
"""Folders whose lines of code are not the model's own."""
_WRAPPERS = r"(module\.)+"
"""The prefix of layer names in modules that wrap a model, as for named inputs or for people with several records."""
_REENTRANT = "None of the inputs have requires_grad"
"""PyTorch's warning for checkpointing with `use_reentrant=True` outside of a graph."""

_ADVICE = {
    "to satisfy the constraint": "a distribution checks its arguments and stops where a record is missing; give it"
    " validate_args=False",
    "within the support": "a distribution checks its values and stops where a record is missing; give it"
    " validate_args=False",
    "should be between 0 and 1": "binary_cross_entropy stops at numbers beyond 0 and 1, and where a record is missing;"
    " give it outputs.nan_to_num(0.5), or take binary_cross_entropy_with_logits, without a sigmoid before it",
    "var has negative": "a variance has to be above 0; make it so, as by .exp() or nn.functional.softplus",
    "is out of bounds for dimension": "an index that follows from a record's numbers, such as the length of sparsemax's"
    " support, has no place where these are missing; bound it, as by .clamp(0, length - 1)",
    "Length of all samples has to be greater than 0": "a record may be padding alone, of length 0; give"
    " pack_padded_sequence lengths.clamp(min=1)",
}
"""What to do, by words of PyTorch's errors."""


@contextmanager
def refuse_failures(model: PerExampleModel, form: InputSpec) -> Iterator[None]:
    """Turn any exception that a model raises on made-up records into an UnsupportedModelError of one sentence."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=_REENTRANT)
            yield
    except UnsupportedModelError as refusal:
        message = without_wrappers(str(refusal))
        raise UnsupportedModelError(message, code=refusal.code, **refusal.fields) from refusal.__cause__
    except ProcessLostError:
        raise
    except RecordsNotIndependentError as mixed:
        raise RecordsNotIndependentError(without_wrappers(str(mixed)), kind=mixed.kind) from None
    except Exception as error:
        if (kernel := unrepeatable_kernel(error)) is not None:
            where = _where_backward_fails(model, form) or where_raised(error, model)
            raise UnsupportedModelError(refusal_of(kernel, model, form.device, where)) from error
        why = str(error).strip().partition("\n")[0][:200]
        if "use_reentrant=True" in why or _REENTRANT in why:
            raise UnsupportedModelError(
                f"the model {model.name} uses gradient checkpointing with use_reentrant=True, which gives no gradients"
                " to ask for; set use_reentrant=False."
            ) from error
        if "more than 1 value per channel when training" in why:
            raise RecordsNotIndependentError(
                f"the model {model.name} normalises over the batch{where_raised(error, model)} and so mixes records"
            ) from error
        failure = f"the model {model.name} raised {type(error).__name__}{where_raised(error, model)} on made-up records"
        for words, advice in _ADVICE.items():
            if words in why:
                raise UnsupportedModelError(f"{failure} ({why}): {advice}.") from error
        is_float = form.dtype.is_floating_point
        whole = "whole numbers, as far as its tables go"
        numbers = "normal numbers, also large, 0 and missing" if is_float else whole
        raise UnsupportedModelError(
            f"{failure} ({why}); it has to take any records of the shape {list(form.shape)} ({numbers}): bound what it"
            " looks up in a table, as by .long().clamp(0, entries - 1), pool by a mask and not at a mark such as the"
            " end of a text, and take out what fails."
        ) from error


def without_wrappers(sentence: str) -> str:
    """A sentence with the names of layers in the user's own module."""
    return re.sub(rf"\b(layer|buffer|parameter|attribute) {_WRAPPERS}", r"\1 ", sentence)


def where_raised(error: Exception, model: PerExampleModel) -> str:
    """Where an exception was raised: the innermost layer and the model's line of code, if there are any."""
    frames = list(traceback.walk_tb(error.__traceback__))
    layers = [layer for frame, _ in frames if isinstance(layer := frame.f_locals.get("self"), nn.Module)]
    names = {id(part): name for name, part in layers[0].named_modules()} if layers else {}
    lines = traceback.extract_tb(error.__traceback__)
    # A class of models may come with wrappers and losses of its own, which are not the user's code either.
    foreign = (*_LIBRARY_FOLDERS, Path(inspect.getfile(type(model))).parent)
    model_lines = [
        line for line in lines if not any(folder in Path(line.filename).parents for folder in foreign)
    ]
    name = names.get(id(layers[-1]), "") if layers else ""
    layer = _in_layer(name, layers[-1]) if layers else ""
    return f"{layer}, at '{model_lines[-1].line}'," if model_lines else layer


def _in_layer(name: str, layer: nn.Module) -> str:
    inner = re.sub(rf"^({_WRAPPERS}|module$)+", "", name)
    return f" in the layer {inner} ({type(layer).__name__})" if inner else ""


def _where_backward_fails(model: PerExampleModel, form: InputSpec) -> str:
    made_up = form.draw(1, 0)
    failing = layer_in_backward_pass(model.on(form.device), made_up.inputs, made_up.labels)
    return "" if failing is None else _in_layer(*failing)

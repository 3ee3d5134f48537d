"""The registry of the models that are shipped, and how one is built."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from pydantic import JsonValue
from torch import nn

from algorithms.errors import ModelRefusedError
from algorithms.extension import import_factory, is_own
from algorithms.gradients import hinge_loss, logistic_loss
from algorithms.gradients.randomness import same_randomness
from algorithms.models import networks, public_models
from algorithms.models.bounds import HINGE, HUBER_HINGE, LOGISTIC
from algorithms.models.model import (
    Model,
    ModelSettings,
    ModelSpec,
    batch_experts,
    check_module,
    model_build_error,
    settings_of,
)
from algorithms.models.objectives import (
    OBJECTIVES,
    classifier,
    huber_hinge_loss,
    predicting,
)


@dataclass(frozen=True)
class Architecture:
    """How a model is built. settings: their class. takes_tokens: whether inputs are tokens instead of real numbers."""

    make: Callable[[ModelSpec, Any], Model]
    settings: type[ModelSettings] = ModelSettings
    takes_tokens: bool = False


def _plain(make: Callable[..., Model], *positional: Any, **keywords: Any) -> Architecture:
    """A model without settings, from its spec and what else its function needs before that."""
    return Architecture(lambda spec, _: make(*positional, spec, **keywords))


CATALOGUE: dict[str, Architecture] = {
    "softmax": _plain(networks.softmax),
    "linear": _plain(networks.linear),
    "additive": _plain(networks.additive),
    "logistic": _plain(networks.two_classes, "logistic", logistic_loss, LOGISTIC),
    "logistic_through_origin": _plain(
        networks.two_classes, "logistic_through_origin", logistic_loss, LOGISTIC, bias=False
    ),
    "svm": _plain(networks.two_classes, "svm", hinge_loss, HINGE),
    "huber_svm": _plain(networks.two_classes, "huber_svm", huber_hinge_loss, HUBER_HINGE),
    "tanh_cnn": _plain(networks.small_cnn, "tanh_cnn", "tanh"),
    "relu_cnn": _plain(networks.small_cnn, "relu_cnn", "relu"),
    "cifar_cnn": _plain(networks.cifar_cnn, "cifar_cnn", "relu"),
    "cifar_tanh_cnn": _plain(networks.cifar_cnn, "cifar_tanh_cnn", "tanh"),
    "conv_fc": _plain(networks.conv_fc),
    "mlp": Architecture(networks.mlp, networks.DenseSettings),
    "unit_linear": Architecture(networks.unit_linear, networks.UnitSettings),
    "scatter_linear": Architecture(networks.scatter_linear, networks.ScatteredSettings),
    "scatter_cnn": Architecture(networks.scatter_cnn, networks.GroupSettings),
    "bilstm": Architecture(networks.bilstm, networks.TextSettings, takes_tokens=True),
    "timm": Architecture(public_models.timm_model, public_models.TimmSettings),
    "huggingface": Architecture(
        public_models.huggingface_model, public_models.HuggingFaceSettings, takes_tokens=True
    ),
}

_PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def build(  # noqa: PLR0913
    name: str,
    *,
    input_shape: tuple[int, ...],
    classes: int,
    seed: int,
    precision: str = "float32",
    tokens: int | None = None,
    words_sha256: str | None = None,
    padding: int = 0,
    predicts: str | None = None,
    level: float = 0.5,
    settings: Mapping[str, JsonValue] | None = None,
) -> Model:
    """Build the named model for an input shape and a number of classes; `seed` decides its random start.

    Args:
        name: An entry of `CATALOGUE`, or "package.module:factory" for a model of one's own.
        input_shape: Shape of one record's features.
        classes: Number of classes, 1 if the target is not a class.
        seed: Of the random start.
        precision: float32 or bfloat16.
        tokens: Size of the vocabulary if records are tokens.
        words_sha256: Of the vocabulary, for word vectors from a file.
        padding: The entry that pads a text.
        predicts: Class, number, count, quantile, labels, next token or tags; by default a class, or a number if
            `classes` is 1.
        level: Of a quantile.
        settings: Of the model.

    Raises:
        ModelRefusedError: For an unknown name or setting, and for a model that does not fit the data.

    Example:
        >>> model = build("softmax", input_shape=(28, 28), classes=10, seed=0)
        >>> model.module(torch.zeros(2, 28, 28)).shape
        torch.Size([2, 10])
    """
    predicts = predicts or ("number" if classes == 1 else "class")
    spec = ModelSpec(input_shape, classes, tokens, words_sha256, padding, predicts, level)
    if is_own(name):
        return replace(_not_shipped(name, spec, settings or {}, seed), precision=_PRECISIONS[precision])
    if name not in CATALOGUE:
        raise ModelRefusedError(
            f"there is no model {name!r}; choose one of {', '.join(CATALOGUE)},"
            " or name your own package.module:factory."
        )
    architecture = CATALOGUE[name]
    chosen = settings_of(architecture.settings, settings or {}, name)
    if tokens is not None and not architecture.takes_tokens:
        raise ModelRefusedError(
            f"the model {name!r} takes numbers, and the data are tokens of a text; use 'bilstm'."
        )
    if predicts in OBJECTIVES and OBJECTIVES[predicts].of_tokens and name != "huggingface":
        raise ModelRefusedError(
            f"the model {name!r} says one thing of a record, and the target of {predicts} is one of each token; use"
            " 'huggingface'."
        )
    with same_randomness(seed):
        model = predicting(architecture.make(spec, chosen), spec)
    return replace(model, precision=_PRECISIONS[precision], settings=chosen.without_files())


def _not_shipped(name: str, spec: ModelSpec, settings: Mapping[str, JsonValue], seed: int) -> Model:
    """Build a `package.module:factory`: (given, **settings) -> Model, or a module with one output per class."""
    factory = import_factory(name, "the model")
    try:
        with same_randomness(seed):
            own_model = factory(spec, **settings)
    except ModelRefusedError:
        raise
    except Exception as error:
        raise model_build_error(name, error) from None
    if isinstance(own_model, nn.Module):
        own_model = classifier(name, own_model)
    if not isinstance(own_model, Model):
        raise ModelRefusedError(
            f"the model {name!r} made a {type(own_model).__name__}; return a Model or a torch.nn.Module."
        )
    check_module(own_model.module)
    batch_experts(own_model.module)
    _check_scores(name, own_model, spec)
    return replace(predicting(own_model, spec), name=name, settings=dict(settings))


def _check_scores(name: str, model: Model, spec: ModelSpec) -> None:
    """Raises ModelRefusedError unless the model has one score per class, or one for the number that it predicts."""
    if model.packing is not None:
        return
    records = torch.zeros(2, *spec.input_shape, dtype=torch.float32 if spec.tokens is None else torch.int32)
    # In training mode some layers reject few records, or remember them.
    module = copy.deepcopy(model.module).eval()
    try:
        with torch.no_grad(), same_randomness():
            shape = tuple(model.scores(module(records)).shape)
    except Exception as error:
        why = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise ModelRefusedError(
            f"the model {name!r} does not take records of zeros of the shape {list(spec.input_shape)} ({why}); change"
            " it to fit the data."
        ) from None
    if shape[:1] != (2,) or (spec.classes > 1 and shape[-1] != spec.classes):
        raise ModelRefusedError(
            f"the model {name!r} gives scores of the shape {list(shape)} for 2 records, and the data have"
            f" {spec.classes} classes; give each record a score for each of them."
        )

"""Models from files: a new model's start and its frozen layers, and a trained model from `model.safetensors` alone.

A start comes from a public model, or from an earlier release that was charged at the time. No private record is used.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from algorithms.errors import ModelRefusedError, Slot
from algorithms.extension import check_allowed, is_own
from algorithms.model_facts import FACTS, CellLayout, ModelFacts, facts_of
from algorithms.models import build
from algorithms.models.cell_histograms import HistogramCells
from algorithms.models.cells import behind_cells
from algorithms.models.feature_transforms import for_evaluation, front, in_front, shape_after, with_views
from algorithms.models.libraries import digest, read_tensors
from algorithms.models.library_files import from_file
from algorithms.models.model import Model


def load_start(model: Model, path: Path, *, reinitialize: Sequence[str] = ()) -> Model:
    """Load the model's initial parameters from a safetensors file, in place.

    Of a release with learned features, only the model's own parameters are used. reinitialize: names of parameters or
    layers that keep their current start. Raises ModelRefusedError for an unreadable file, for names that the model or
    the file lacks, for other shapes, and for values that are not finite.
    """
    start, note = model.module.state_dict(), ""
    keeps = matching_parameters(model, reinitialize, Slot("network.reinitialize")) if reinitialize else set()
    held = from_file(model, read_tensors(path, "set {network.start} to one", code="start_unreadable"))
    if {name.partition(".")[0] for name in held} in (
        {"features", "model"},
        {"model"},
    ) and start.keys().isdisjoint(held):
        # Behind a map, as by `feature_transforms.in_front`, or behind cells, which have no parameters.
        if any(name.startswith("features.") for name in held):
            note = " The learned map in front of it there is not taken over."
        held = {name.removeprefix("model."): t for name, t in held.items() if name.startswith("model.")}
    stored = {name: t for name, t in held.items() if not (name in keeps or _is_below(name, reinitialize))}
    wanted = start.keys() - keeps
    for names, what in (
        (wanted - stored.keys(), "lacks"),
        (stored.keys() - wanted, "has, unlike the model,"),
    ):
        if names:
            raise ModelRefusedError(
                "{file} {differs} {name}; give a file of the same model, or list what is new in"
                " {network.reinitialize}.",
                code="start_of_another_model",
                file=path.name,
                differs=what,
                name=min(names),
            )
    for name, tensor in stored.items():
        stored_form, expected_form = (
            f"{'numbers' if t.is_floating_point() else 'whole numbers'} of shape {list(t.shape)}"
            for t in (tensor, start[name])
        )
        if stored_form != expected_form:
            raise ModelRefusedError(
                "{name} is {there} in {file}, but {here} in the model; give a file of the same model, or"
                " list it in {network.reinitialize}.",
                code="start_of_another_shape",
                name=name,
                there=stored_form,
                file=path.name,
                here=expected_form,
            )
        if not bool(torch.isfinite(tensor.to(start[name].dtype)).all()):
            raise ModelRefusedError(
                f"{name} in {path.name} is not finite everywhere as {start[name].dtype}; give the file of a sound"
                " model."
            )
        start[name].copy_(tensor)
    exceptions = (
        f", except for {', '.join(reinitialize)}, drawn from the model's seed." if reinitialize else "."
    )
    note = f"The start is the file {path.name} (SHA-256 {digest(path)}){exceptions}{note}"
    return replace(model, notes=(*model.notes, note))


def freeze_parameters(model: Model, chosen: Sequence[str]) -> Model:
    """Freeze parameters or layers, by name or by pattern, in place.

    Raises ModelRefusedError for unknown names, and if nothing is left to train.
    """
    names = matching_parameters(model, chosen, Slot("network.freeze"))
    for name in names:
        model.module.get_parameter(name).requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.module.parameters()):
        raise ModelRefusedError(
            "{network.freeze} leaves nothing to train; take some of it out.",
            code="all_frozen",
        )
    return replace(model, notes=(*model.notes, f"Not trained: {', '.join(chosen)}."))


def matching_parameters(model: Model, chosen: Sequence[str], setting: Slot) -> set[str]:
    """The parameters that have one of the names, or whose layer does; raises ModelRefusedError for an unknown name.

    setting: that the names are from.
    """
    names = [name for name, _ in model.module.named_parameters()]
    for prefix in chosen:
        if not any(_is_below(name, [prefix]) for name in names):
            layers = list(dict.fromkeys(name.rpartition(".")[0] or name for name in names))
            raise ModelRefusedError(
                "{setting} lists {prefix!r}, which the model {model!r} has not; its layers are {layers}.",
                code="layer_unknown",
                setting=setting,
                prefix=prefix,
                model=model.name,
                layers=", ".join(layers),
            )
    return {name for name in names if _is_below(name, chosen)}


def _is_below(name: str, prefixes: Sequence[str]) -> bool:
    """Whether a name has one of the prefixes, which may be patterns such as `encoder.layer.[0-3].*`."""
    return any(fnmatchcase(name, prefix) or fnmatchcase(name, f"{prefix}.*") for prefix in prefixes)


def adapt(
    model: Model,
    *,
    input_shape: tuple[int, ...],
    start: Path | None = None,
    reinitialize: Sequence[str] = (),
    freeze: Sequence[str] = (),
    augmentations: int = 1,
) -> Model:
    """Load a new model's start from a file, freeze layers, and train on several views of each record.

    start: a safetensors file. reinitialize: names of parameters that keep their random start. freeze: names of
    parameters that are not trained. Raises ModelRefusedError if one of these does not fit the model.
    """
    if reinitialize and start is None:
        raise ModelRefusedError(
            "{network.reinitialize} is what {network.start} leaves as it is; give {network.start}, or no"
            " {network.reinitialize}.",
            code="reinitialize_without_start",
        )
    if start is not None:
        model = load_start(model, start, reinitialize=reinitialize)
    if freeze:
        model = freeze_parameters(model, freeze)
    return model if augmentations == 1 else with_views(model, augmentations, input_shape)


def load_model(path: Path, *, allow_code: Collection[str] = ()) -> tuple[Model, dict[str, Tensor]]:
    """The architecture and the named parameters of a model that the train stage wrote.

    No other file is needed, since values that came from a start or an embedding file are among the parameters.
    allow_code, and what is raised: as in `load`.

    Raises ModelRefusedError for a file that lacks parameters.
    """
    model = architecture(facts_of(path), allow_code=allow_code)
    with safe_open(path, framework="pt") as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    parameters = from_file(model, stored)
    missing = model.published_tensors(model.initial_parameters()).keys() - parameters.keys()
    if missing:
        raise ModelRefusedError(
            f"{path.name} lacks {min(missing)}; train again, or take the file that was published."
        )
    return model, parameters


def architecture(facts: ModelFacts, *, allow_code: Collection[str] = ()) -> Model:
    """The model that a file describes, with placeholder parameters; see `load`.

    Raises ModelRefusedError for a file that names other files.
    """
    check_allowed(facts.model, allow_code, "the model's file")
    settings = facts.model_settings or {}
    files = [key for key in settings if key == "checkpoint" or key.endswith("_file")]
    if files and not is_own(facts.model):
        raise ModelRefusedError(
            f"the model's file names a file of this machine as {files[0]}, and one that epsilonflow wrote has all"
            " values in it; take the file of a run."
        )
    shape, cells = facts.input_shape, facts.cells
    features = None if facts.front is None else front(facts.front, shape)
    if isinstance(features, HistogramCells):
        sizes, weights = features.layout
        cells = CellLayout(sizes=tuple(sizes), weights=tuple(weights))
    if cells is not None:
        shape = (sum(cells.sizes),)
    model = build(
        facts.model,
        input_shape=shape if features is None or cells is not None else shape_after(features, shape),
        classes=facts.output_count,
        seed=0,
        tokens=facts.tokens,
        padding=facts.padding,
        predicts=facts.predicts,
        level=facts.level,
        settings=settings,
    )
    if cells is not None:
        model = behind_cells(model, cells.sizes, cells.weights)
    if features is not None:
        model = in_front(features, model)
    temperature, scores = facts.temperature, model.scores
    return model if temperature is None else replace(model, scores=lambda out: scores(out) / temperature)


def set_temperature(path: Path, temperature: float) -> None:
    """Let the model in a file divide its scores by a temperature, so that its probabilities are recalibrated."""
    facts = facts_of(path).model_copy(update={"temperature": temperature})
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    fresh = path.with_suffix(".recalibrated")
    save_file(tensors, fresh, metadata={FACTS: json.dumps(facts.document())})
    fresh.replace(path)


class TrainedModel(nn.Module):
    """A trained model as a module, from prepared inputs [batch, *input_shape] to scores [batch, classes].

    For models that were trained with cross-entropy, the softmax of the scores gives class probabilities.

    Attributes:
        classes: names of the classes, labels or tags, in the order of the scores; empty if they have no names.
        predicts: class, number, labels, next token or tags.
        target: the data card's declaration of another target, as JSON values; None for classes.
        input_shape: of one record's features.
        preparation: the data card's declaration of how records become features, as JSON values; `tasks.predict` reads
            files by it. None for a model of an older version.
        facts: everything that the file states about the model.
    """

    def __init__(self, model: Model, parameters: Mapping[str, Tensor], facts: ModelFacts) -> None:
        super().__init__()
        model = for_evaluation(model)
        model.module.load_state_dict(dict(parameters), strict=False)
        self.network = model.module.eval().requires_grad_(False)
        self._scores = model.scores
        self.classes = facts.classes
        self.predicts = "class" if facts.predicts is None else facts.predicts
        self.target = facts.target
        self.input_shape = facts.input_shape
        self.preparation = facts.preparation
        self.facts = facts

    def forward(self, inputs: Tensor) -> Tensor:
        """Scores, one for each class."""
        return self._scores(self.network(inputs))


def load(path: str | Path, *, allow_code: Collection[str] = ()) -> TrainedModel:
    """Load a trained model from a file, or from a folder with `model.safetensors`, such as `artifacts` or a release.

    Args:
        path: of the file or the folder.
        allow_code: models of one's own, `package.module:factory`, that the file may name; no other code is imported,
            whatever the file says.

    Returns:
        A module in evaluation mode, which states how its records were prepared.

    Raises:
        ModelRefusedError: for a file that epsilonflow did not write, or that lacks parameters.
        NotUsableError: for a file of a model of one's own that is not allowed.

    Example:
        >>> import algorithms, torch
        >>> model = algorithms.load("artifacts")                    # doctest: +SKIP
        >>> model(torch.zeros(1, *model.input_shape)).softmax(-1)   # doctest: +SKIP
    """
    file = Path(path)
    file = file / "model.safetensors" if file.is_dir() else file
    model, parameters = load_model(file, allow_code=allow_code)
    return TrainedModel(model, parameters, facts_of(file))

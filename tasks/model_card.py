"""A trained model's card for the hub of Hugging Face.

Its metadata is made by `huggingface_hub`, the hub's own library; its sections come from the privacy card.
"""

import json
import logging
from importlib.util import find_spec
from typing import Any

from algorithms.models.libraries import imported_library
from algorithms.models.saved import TrainedModel
from algorithms.plain_text import for_markdown, visible
from algorithms.privacy.card import PrivacyCard
from algorithms.privacy.card.text import not_protected, protection_sentence, statement
from data.preparation import preparation_of
from tasks.runs.metrics import held_out_metrics, metric_rows, metric_words, private_estimates
from tasks.runs.metrics_document import Metrics, is_private

_LOG = logging.getLogger(__name__)
_LIBRARY = "huggingface_hub"
_OTHER_TASK = "other"
"""The hub's name of a task that it has no other name for."""
_RECORDS = {
    **dict.fromkeys(("csv", "parquet", "datasets", "synthetic"), "tabular"),
    **dict.fromkeys(("texts", "reviews"), "text"),
    **dict.fromkeys(("images", "image_table", "idx", "digits", "cifar"), "image"),
}
"""What records are to the hub, by the kind of their reader; a reader of the user's own may read anything."""
_OF_PARTS = {"tags": "token-classification", "next token": "text-generation"}
"""The tasks of models that give an output for each part of a text."""
_HUB_METRICS = {
    "micro_f1": "f1",
    "token_accuracy": "accuracy",
    "entity_f1": "seqeval",
    "r2": "r_squared",
    "auc": "roc_auc",
}
"""The hub's identifiers of metrics that have other names here."""
_OF_RECORDS = ("majority_accuracy", "positive_share", "mean_rmse")
"""What is estimated of held-out records alone, and is no result of the model."""


def model_card(card: PrivacyCard, model: TrainedModel, metrics: Metrics) -> str:
    """A model card: metadata for the hub, and sections for people, of which that on privacy is from the privacy card.

    Without `huggingface_hub` the card has no metadata, and a warning says how to install it.
    """
    setting, mechanism = card.setting, card.mechanism
    parameters = sum(value.numel() for value in model.state_dict().values())
    learned = "" if mechanism.features.name == "none" else ", with those of learned features"
    classes = ", ".join(map(str, model.classes))
    what = f"Classes: {classes}" if model.target is None else f"Target: {json.dumps(dict(model.target))}"
    facts = (f"Parameters{learned}: {parameters:,}", what, f"Data set: {setting.dataset}")
    paragraphs = [
        f"# {for_markdown(f'{setting.title}: {mechanism.model.name} by {mechanism.algorithm}')}",
        "## Model",
        "\n".join(f"- {for_markdown(fact)}" for fact in facts),
        "## Evaluation",
        _held_out_sentence(metrics),
        *(
            ["\n".join(f"- {for_markdown(f'{name}: {value}')}" for name, value in metric_rows(metrics))]
            if metrics
            else []
        ),
        "## Privacy",
        f"**{for_markdown(statement(card))}**",
        for_markdown(protection_sentence(card)),
        "What is not protected:",
        "\n".join(f"- {for_markdown(line)}" for line in not_protected(card)),
        "`privacy_card.json` is the signed card. `epsilonflow card verify privacy_card.json --key KEY` recomputes"
        " epsilon from its events, where KEY is the owner's public key.",
    ]
    text = "\n\n".join(paragraphs) + "\n\n"
    if find_spec(_LIBRARY) is None:
        _LOG.warning(
            "README.md has no metadata for the hub of Hugging Face, since %s is missing: pip install"
            " 'epsilonflow[hub]'.",
            _LIBRARY,
        )
        return text
    return str(imported_library(_LIBRARY).ModelCard(f"---\n{_metadata(card, model, metrics)}\n---\n\n{text}"))


def _held_out_sentence(metrics: Metrics) -> str:
    if not metrics:
        return "None was recorded with the model."
    return f"On held-out records, which are {'private' if is_private(metrics) else 'public'}:"


def _metadata(card: PrivacyCard, model: TrainedModel, metrics: Metrics) -> str:
    """The head of a model card as YAML.

    It has no key `datasets`, whose entries name data sets of the hub, and no licence, since the card knows that of the
    records alone.
    """
    setting, hub, task = card.setting, imported_library(_LIBRARY), _task(model)
    estimates = held_out_metrics(metrics) if metrics else {}
    results = [
        hub.EvalResult(
            task_type=task,
            dataset_type=setting.dataset,
            dataset_name=visible(setting.title),
            dataset_split="test",
            metric_type=_HUB_METRICS.get(name, name),
            metric_name=_metric_title(name, metrics),
            metric_value=value,
        )
        for name, value in estimates.items()
        if value is not None and name not in _OF_RECORDS
    ]
    data: Any = hub.ModelCardData(
        library_name="epsilonflow",
        pipeline_tag=None if task == _OTHER_TASK else task,
        tags=[*(["differential-privacy"] if setting.private else []), card.mechanism.algorithm],
        metrics=[_HUB_METRICS.get(name, name) for name in list(estimates)[:1]] or None,
        model_name=f"{setting.dataset}-{card.mechanism.algorithm}",
        eval_results=results or None,
    )
    if not results:
        data.pop("model_name")
    return str(data.to_yaml())


def _metric_title(name: str, metrics: Metrics) -> str:
    """A metric's name for people, with the interval of an estimate from private records."""
    estimate = private_estimates(metrics)[f"test_{name}"] if is_private(metrics) else None
    if estimate is None:
        return metric_words(name)
    return f"{metric_words(name)}, 95% interval {estimate['low']:.4g} to {estimate['high']:.4g}"


def _task(model: TrainedModel) -> str:
    """The hub's name of what the model does."""
    preparation = preparation_of(model.preparation)
    records = "" if preparation is None else _RECORDS.get(preparation.reader_kind, "")
    if model.predicts in _OF_PARTS:
        return _OF_PARTS[model.predicts]
    if records and model.predicts in ("class", "labels"):
        return f"{records}-classification"
    return "tabular-regression" if records == "tabular" else _OTHER_TASK

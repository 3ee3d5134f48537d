"""A privacy card as an entry of the OpenDP registry of deployments, by its schema.

Source of the form: opendp/deployments-registry-data, schemas/deployments-schema.yaml, at 3e9c812. What the card knows
is filled in from it; what it cannot know comes from the section `deployment` of the data card. The registry renders
texts as Markdown, so names are escaped.
"""

import io
import re
from typing import Any

from ruamel.yaml import YAML

from algorithms.errors import RefusedError
from algorithms.plain_text import for_markdown
from algorithms.privacy.card import PrivacyCard
from algorithms.privacy.card import text as words
from data.card import DataCard
from data.deployment import Deployment

_ACTORS = (
    "The curator holds the records, the key that signs the card and the ledger, and is trusted; so are the machine and"
    " the code that ran. Analysts who train are trusted not to attack, and every cost is reserved in the ledger before"
    " records are read. Whoever sees what is released is an adversary who may know all else and compute anything."
)
_POST_PROCESSING = (
    "Updates of the model, averages of its parameters, and predictions on other records are computed from the noised"
    " releases alone. The report's figures are, too; its metrics "
)
_METRICS = {
    "none": "are none.",
    "public": "are of held-out records that are declared public.",
    "private": "follow from one noised histogram of private held-out records, which the run was charged with.",
}


_CHOICES = {
    *("url_slug", "status", "data_product_type", "publication_date", "data_product_sector", "variant_name"),
    *("model_name", "release_type", "data_source_type", "access_type"),
}
"""Fields that hold one of some words."""


def registry_entry(card: PrivacyCard, data: DataCard) -> dict[str, object]:
    """The entry; raises RefusedError for a run that promises no privacy, and without a section `deployment`."""
    setting, deployed = card.setting, data.deployment
    if not setting.private:
        raise RefusedError(
            "the registry lists deployments that are private, and this card's guarantee is {guarantee!r}: its"
            " form has no field that would say so; train with secret noise and export that card.",
            code="card_not_private",
            guarantee=setting.guarantee,
        )
    if deployed is None:
        raise RefusedError(
            "the data card {dataset!r} has no section `deployment`, and a card does not know who publishes the"
            " model; give deployment: {{curators, use, region, contact, published}}.",
            code="bad_card",
            dataset=data.name,
            keys=("deployment",),
        )
    entry: dict[str, object] = {
        "url_slug": re.sub("[^a-z0-9]+", "-", f"{setting.dataset}-{card.evidence.run_id}".lower()).strip("-"),
        "status": "Draft",
        "tier": 3,
        "deployment": {
            "basic": _basic(card, deployed),
            "dp_variant": {
                "variant_name": "Pure DP" if setting.delta == 0 else "Approximate DP",
                "data_domain": f"All sets of records of the form that the data card of {setting.title} declares, with"
                " its bounds, categories and classes, which were not computed from the records.",
                "unprotected_quantities": " ".join(words.not_protected(card)),
            },
            "privacy_loss": _privacy_loss(card),
            "deployment_model": _deployment_model(card),
            "accounting": {
                "post_processing": _POST_PROCESSING + _METRICS[setting.holdout],
                "composition": f"{_composition(card)} {words.across_runs(card.accounting.across_runs)}",
            },
            "implementation": {
                "preprocessing_and_hyperparameter_tuning": f"Transform: {words.transform(card.mechanism)}"
                f" Learned features: {words.features(card.mechanism.features)} Trying out settings:"
                f" {words.tuning(card)}",
                "mechanisms": _mechanisms(card),
                **({} if deployed.justification is None else {"justification": deployed.justification}),
            },
            "administrative": {
                "sources": f"Data: {setting.source}. Privacy card of run {card.evidence.run_id}.",
                "notes": words.signature(card),
                "registry_authors": [deployed.contact],
            },
        },
    }
    return {name: _escape(name, value) for name, value in entry.items()}


def _basic(card: PrivacyCard, deployed: Deployment) -> dict[str, object]:
    title, model = card.setting.title, card.mechanism.model.name
    usual = f"A model ({model}) that was trained by {card.mechanism.algorithm} on {title}."
    return {
        "name": f"{title}: {model}",
        "data_curators": list(deployed.curators),
        "intended_use": deployed.use,
        "data_product_type": "Machine learning model",
        "data_product_region": deployed.region,
        "description": deployed.description or usual,
        "publication_date": deployed.published,
        **({} if deployed.sector is None else {"data_product_sector": deployed.sector}),
    }


def _privacy_loss(card: PrivacyCard) -> dict[str, object]:
    setting, accounting = card.setting, card.accounting
    change = {"ADD_OR_REMOVE_ONE": "adding or removing", "REPLACE_ONE": "replacing"}[setting.adjacency]
    return {
        "privacy_unit": setting.unit,
        "privacy_unit_details": f"Neighbouring sets differ by {change} {words.unit_in_words(card)}."
        f" {words.protection_sentence(card)}",
        "privacy_parameters": {"epsilon": card.cost, "delta": setting.delta},
        "privacy_parameters_details": f"By the accountant {accounting.accountant} of {accounting.library}"
        f" {accounting.library_version}, recomputed from the recorded events by `verify_card.py`.",
    }


def _deployment_model(card: PrivacyCard) -> dict[str, object]:
    accounting = card.accounting
    several = accounting.blocks is not None or accounting.population.spent.epsilon != card.cost
    fixed = "The records do not change."
    return {
        "model_name": "Central",
        "model_name_details": "The curator holds the records and adds noise to sums over them.",
        "actors": _ACTORS,
        "release_type": "Many releases" if several else "One release",
        "release_type_details": words.population(card),
        "data_source_type": "Static" if accounting.blocks is None else "Dynamic",
        "data_source_type_details": fixed if accounting.blocks is None else words.block_unit(card),
        "access_type": "Non-interactive",
        "access_type_details": "The model and its noise trace are published; nobody queries the records.",
    }


def _escape(name: str, value: Any) -> Any:
    """Free texts as Markdown that shows them as they are."""
    if isinstance(value, dict):
        return {key: _escape(key, part) for key, part in value.items()}
    if isinstance(value, list):
        return [_escape(name, part) for part in value]
    return for_markdown(value) if isinstance(value, str) and name not in _CHOICES else value


def _composition(card: PrivacyCard) -> str:
    kind = card.accounting.composition.kind
    if kind == "schedule":
        return "The releases of the run were fixed in advance and are composed as a whole."
    return f"The releases of the run were chosen adaptively under a {kind} filter, whose limit is what the run costs."


def _mechanisms(card: PrivacyCard) -> str:
    kinds = dict.fromkeys(
        f"{query.kind}: {query.noise} noise, {query.clipping} bounds, {query.sampling} sampling"
        for query in card.mechanism.queries
    )
    return (
        f"{'; '.join(kinds)}. {words.noise(card)}. Software: {words.software(card)}."
        f" {words.rounding(card.implementation.rounding, card.implementation.device)} {words.side_channels(card)}"
    )


def as_yaml(entry: dict[str, object]) -> str:
    """The entry as a file of the registry."""
    out = io.StringIO()
    YAML(typ="safe", pure=True).dump(entry, out)
    return out.getvalue()

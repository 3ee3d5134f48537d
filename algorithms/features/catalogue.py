"""The kinds of learned features by name."""

import json
from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter

from algorithms.features.features import Features
from algorithms.features.principal_components import PrincipalComponents
from algorithms.features.standardised import Standardised
from algorithms.features.whitened import Whitened
from algorithms.privacy.errors import Refused

FEATURES: dict[str, type[Features]] = {
    "whitened": Whitened,
    "principal_components": PrincipalComponents,
    "standardised": Standardised,
}


def from_settings(settings: Mapping[str, Any]) -> Features:
    """The features that `settings` name under "name", with the other keys as their settings.

    Raises Refused for an unknown name and pydantic's ValidationError for unknown or impossible settings.
    """
    name = settings.get("name")
    if not isinstance(name, str) or name not in FEATURES:
        raise Refused(f"there are no features {name!r}; choose none or one of {', '.join(FEATURES)}.")
    own = {key: value for key, value in settings.items() if key != "name"}
    features: Features = TypeAdapter(FEATURES[name]).validate_json(json.dumps(own))
    return features

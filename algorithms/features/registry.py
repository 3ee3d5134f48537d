"""The kinds of learned features by name."""

import json
from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter

from algorithms.core.features import Features
from algorithms.errors import RefusedError
from algorithms.extension import imported, is_own
from algorithms.features.centred import Centred
from algorithms.features.principal_components import PrincipalComponents
from algorithms.features.standardised import Standardised
from algorithms.features.whitened import Whitened

FEATURES: dict[str, type[Features]] = {
    "whitened": Whitened,
    "principal_components": PrincipalComponents,
    "standardised": Standardised,
    "centred": Centred,
}


def from_settings(settings: Mapping[str, Any]) -> Features:
    """The features that `settings` name under "name", with the other keys as their settings.

    Raises RefusedError for an unknown name and pydantic's ValidationError for unknown or impossible settings.
    """
    name = settings.get("name")
    own = {key: value for key, value in settings.items() if key != "name"}
    if isinstance(name, str) and is_own(name):
        learned: Features = TypeAdapter(imported(name, "the features")).validate_json(json.dumps(own))
        missing = [part for part in ("releases", "module") if not callable(getattr(learned, part, None))]
        if missing:
            raise RefusedError(f"the features {name!r} have no {missing[0]}; see `algorithms.core.features`.")
        return learned
    if not isinstance(name, str) or name not in FEATURES:
        raise RefusedError(f"there are no features {name!r}; choose none or one of {', '.join(FEATURES)}.")
    features: Features = TypeAdapter(FEATURES[name]).validate_json(json.dumps(own))
    return features

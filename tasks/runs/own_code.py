"""Whether code of the user's own, which DVC does not watch, has changed since a stage ran."""

from pathlib import Path

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from algorithms.extension import NotUsableError, is_own, source_digest
from data.card import DataRefusedError, data_card
from data.files import read_json
from data.formats import Own

_GROUPS = ("algorithm", "features", "model")
"""Groups of params.yaml that may name code, whose digests are in the plan."""


def has_changed(stage: str, root: Path) -> bool:
    """Whether a stage has to run again in the checkout at `root`, or to refuse, since such code has changed."""
    if stage not in ("prepare", "calibrate"):
        return False
    try:
        named = YAML(typ="safe").load(root / "params.yaml")
        if stage == "prepare":
            reader = data_card(str(named["data"]["dataset"]), root / "data" / "cards").reader
            return isinstance(reader, Own) and source_digest(reader.factory) != reader.source_sha256
        names = {group: str((named.get(group) or {}).get("name")) for group in _GROUPS}
        plan = root / "artifacts" / "plan.json"
        kept = read_json(plan)["code"] if plan.exists() else {}
        return any(
            is_own(name) and source_digest(name) != kept.get(group, source_digest(name))
            for group, name in names.items()
        )
    except NotUsableError:
        return True
    except (OSError, YAMLError, DataRefusedError, KeyError, TypeError, AttributeError):
        return False  # the stage says what is wrong

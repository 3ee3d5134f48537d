"""Under which description of the data a model was trained, so that nothing is said of it under another one."""

from collections.abc import Mapping
from typing import Any

from algorithms.privacy.errors import Refused
from data import PublicDescription


def described(public: PublicDescription) -> dict[str, str]:
    """Of which data the run is, and a digest of their description, for `check_described`."""
    return {
        "dataset": public.dataset,
        "population": public.population,
        "description_sha256": public.digest,
    }


def check_described(receipt: Mapping[str, Any], public: PublicDescription) -> None:
    """Raises Refused where the data are described otherwise than when the model was trained.

    A card would tell of other data, and other records may be held out now, some of which the model was trained on.
    """
    trained_under = receipt.get("description_sha256")
    if trained_under is None:
        raise Refused(
            "artifacts/receipt.json, of an older version, does not say how the data were described when the model was"
            " trained; keep what the run has, or train again."
        )
    if trained_under != public.digest:
        raise Refused(
            "data/prepared/public.json describes the data otherwise than when the model was trained; prepare them again"
            " with the data card as it was, or train again."
        )

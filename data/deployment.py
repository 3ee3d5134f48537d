"""What a data card may say of the use of its models, for a registry of deployments: facts that no run knows."""

from datetime import date
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from data.targets import CardPart, Word


def _checked_day(day: str) -> str:
    if date.fromisoformat(day).isoformat() != day:  # which also reads 20260131
        raise ValueError("give the day as 2026-01-31")
    return day


class Deployment(CardPart):
    """Who publishes models of these records, and what for.

    curators: who publishes. use: what for. region: what the records describe, or whose law applies. contact: who
    answers for the entry. published: the day, as 2026-01-31. description: of the model in a sentence. justification:
    why the settings are as they are.
    """

    curators: Annotated[tuple[Word, ...], Field(min_length=1)]
    use: Word
    region: Word
    contact: Word
    published: Annotated[str, AfterValidator(_checked_day)]
    sector: Literal["Technology", "Healthcare", "Education", "Government", "Energy", "Finance"] | None = None
    description: Word | None = None
    justification: Word | None = None

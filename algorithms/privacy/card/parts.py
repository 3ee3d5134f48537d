"""What the sections of a privacy card are made of."""

from typing import Annotated, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

Text: TypeAlias = Annotated[str, StringConstraints(pattern=r"\S")]
Texts: TypeAlias = Annotated[tuple[Text, ...], Field(min_length=1)]
Sha256: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
NotNegative: TypeAlias = Annotated[float, Field(ge=0)]
Positive: TypeAlias = Annotated[float, Field(gt=0)]
Probability: TypeAlias = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """A part of the card; numbers are finite, and null stands where a number would be infinite."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Amount(Section):
    """An (epsilon, delta) pair; epsilon is null where it is infinite."""

    epsilon: NotNegative | None
    delta: Probability

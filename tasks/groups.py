"""The groups of params.yaml as strict models."""

import re
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, field_validator

from data.description import Transform

_PASSWORD = re.compile(r"://[^/@]*:[^@]*@|[?&](ssl)?password=")


Word = Annotated[str, Field(min_length=1)]


class Group(BaseModel):
    """One group of params.yaml."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Data(Group):
    """dataset: the name of a data card. transform: of its records, each by itself; scattering is for images.

    blocks: those to train on, of a data set whose card says blocks; empty for all that there are.
    """

    dataset: str = Field(min_length=1)
    transform: Transform = "none"
    blocks: list[Word] = Field(default_factory=list)


class Privacy(Group):
    """The target of a run.

    count_noise: noise multiplier of the number of records, which is released when it is private.
    noise: "seeded" is for tests and comparisons, and its results are not private. diagnostics: records what clipping
    and noise did to each gradient, of public records alone; the run is then not private either.
    """

    epsilon: float = Field(gt=0)
    delta: float = Field(ge=0, lt=1)
    accountant: Literal["pld", "rdp", "pure"] = "pld"
    noise: Literal["secure", "seeded"] = "secure"
    count_noise: float = Field(default=100.0, gt=0)
    diagnostics: bool = False


class Model(Group):
    """Which model, where it starts, and what of it is trained.

    name: of the catalogue of models. seed: of its start, which is public. precision: of its gradients. settings: the
    model's own. start: path of a safetensors file with the parameters to start from, of a public model or of an earlier
    release. fresh: layers or parameters, by name, that the file does not give. freeze: those that are not trained.
    views: of each image, by which its gradient is averaged.

    The plan holds the SHA-256 of every file that is named here, and training refuses another file under the same name;
    DVC does not watch these files, so a changed file should have a new name.
    """

    name: str = Field(min_length=1)
    seed: int = Field(default=0, ge=0, lt=2**63)
    precision: Literal["float32", "bfloat16"] = "float32"
    settings: dict[str, JsonValue] = Field(default_factory=dict)
    start: str | None = Field(default=None, min_length=1)
    fresh: list[Word] = Field(default_factory=list)
    freeze: list[Word] = Field(default_factory=list)
    views: int = Field(default=1, ge=1)


class Memory(Group):
    """Settings that never change the result, but for its rounding.

    memory_mb: for per-record work; physical_batch, the records taken at once, follows from it unless given, and is
    rounded down to a multiple of 64, or to 32 or 1.
    """

    memory_mb: int = Field(default=1024, ge=1)
    physical_batch: int | None = Field(default=None, ge=1)


class Performance(Memory):
    """Further settings of the same kind. checkpoint_seconds: between two."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int | None = Field(default=None, ge=1)
    checkpoint_seconds: float = Field(default=10.0, gt=0)


class Tracking(Group):
    """Where Weights & Biases keeps the runs."""

    project: str = Field(default="epsilonflow", min_length=1)
    mode: Literal["offline", "online", "disabled"] = "offline"
    entity: str | None = Field(default=None, min_length=1)


class LedgerPlace(Group):
    """url: of the ledger, without a password. Whose budget is charged is the data card's to say."""

    url: str | None = Field(default=None, min_length=1)

    @field_validator("url")
    @classmethod
    def _has_no_password(cls, url: str | None) -> str | None:
        if url and _PASSWORD.search(url):
            raise ValueError(
                "a password does not belong in a file; put the whole URL in EPSILONFLOW_LEDGER_URL"
            )
        return url


MODELS: Mapping[str, type[Group]] = {
    "data": Data,
    "privacy": Privacy,
    "model": Model,
    "performance": Performance,
    "tracking": Tracking,
    "ledger": LedgerPlace,
}
GROUPS = ("data", "privacy", "features", "algorithm", "model", "performance", "tracking", "ledger")
OPTIONAL = ("features", "performance", "tracking", "ledger")
WITHOUT_EFFECT = ("performance", "tracking", "ledger")
"""What never changes a result, so that no stage of dvc.yaml depends on it."""

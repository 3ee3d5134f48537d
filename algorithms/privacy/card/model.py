"""The form of a privacy card: every field but `blocks` is required, none may be empty, and no other is allowed."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, JsonValue, model_validator

from algorithms.privacy.card.blocks import Blocks
from algorithms.privacy.card.parts import (
    Amount,
    NotNegative,
    Positive,
    Probability,
    Section,
    Sha256,
    Text,
    Texts,
)

RELEASED = ("model.safetensors", "plan.json", "trace.parquet")
"""The files that a run publishes and whose checksums its card holds."""


class Setting(Section):
    """What is promised, about whose data. epsilon: null where the run is not private."""

    statement: Text
    private: bool
    epsilon: NotNegative | None
    delta: Probability
    adjacency: Literal["ADD_OR_REMOVE_ONE", "REPLACE_ONE"]
    unit: Text
    dataset: Text
    title: Text
    source: Text
    licence: Text
    population: Text
    public_records: bool


class Scope(Section):
    """Who is protected and who is not, and what the promise leaves out."""

    protected: Text
    not_protected: Texts
    released: Texts
    holdout: Text
    hyper_parameter_search: Text
    side_channels: Text


class Model(Section):
    """The trained model. parameters: how many numbers it has. notes: what is public of its start and its parts."""

    name: Text
    seed: int
    parameters: Annotated[int, Field(ge=1)]
    notes: Text


class Span(Section):
    """The least and the most that a number was during the run; null for an infinite one."""

    least: NotNegative | None
    most: NotNegative | None


class Query(Section):
    """Releases of one kind. clip_norm: bound of one record. noise_std: on the sum, before it is divided."""

    kind: Text
    sampling: Text
    clipping: Text
    noise: Text
    count: Annotated[int, Field(ge=1)]
    sampling_rate: Span
    clip_norm: Span
    noise_multiplier: Span
    noise_std: Span
    divisor: Span


class Mechanism(Section):
    """What was asked of the records.

    transform, features: what each record was made into by itself, and what was learned from all, in words.
    diagnostics: whether anything was computed from the records and shown without noise. noise_multiplier: null where it
    was chosen on the way, with what it was in `queries`.
    """

    transform: Text
    features: Text
    diagnostics: bool
    algorithm: Text
    settings: dict[str, JsonValue]
    model: Model
    steps: Annotated[int, Field(ge=1)]
    releases: Annotated[int, Field(ge=1)]
    noise_multiplier: NotNegative | None
    sampling_rate: Probability
    divisor: Positive | None
    queries: Annotated[tuple[Query, ...], Field(min_length=1)]


class Costs(Section):
    """Epsilon of the recorded events, or of the filter they were held to; null where there is no finite bound."""

    pld: NotNegative | None
    rdp: NotNegative | None
    pure: NotNegative | None


class Discretisation(Section):
    """pld_interval: grid of the privacy losses, or null where Rényi bounds are taken, as below delta 1e-11.
    rdp_orders: lowest, highest and how many.
    """

    pld_interval: Positive | None
    rdp_lowest_order: Positive
    rdp_highest_order: Positive
    rdp_orders: Annotated[int, Field(ge=1)]


class Composition(Section):
    """How the releases of the run add up: fixed in advance, or chosen on the way under a filter.

    rho: the limit of a zCDP filter. order, limit: of a Rényi filter.
    """

    kind: Literal["schedule", "zcdp", "renyi"]
    rho: Positive | None
    order: Annotated[float, Field(gt=1)] | None
    limit: Positive | None
    statement: Text

    @model_validator(mode="after")
    def _has_what_its_filter_needs(self) -> Self:
        found = {name for name in ("rho", "order", "limit") if getattr(self, name) is not None}
        if found != {"schedule": set(), "zcdp": {"rho"}, "renyi": {"order", "limit"}}[self.kind]:
            raise ValueError("rho belongs to a zcdp filter, order and limit to a renyi filter")
        return self


class Population(Section):
    """Where the population's budget stood when the run had settled; all its runs together are charged to it."""

    cap: Amount
    spent: Amount
    remaining: Amount
    statement: Text


class Accounting(Section):
    """How epsilon was computed. accountant: whose epsilon the run was held to.

    blocks: those that a run on blocks was charged to; the key is absent for a run on a whole population.
    """

    accountant: Literal["pld", "rdp", "pure"]
    epsilon: Costs
    delta: Probability
    target: Amount
    library: Text
    library_version: Text
    discretisation: Discretisation
    composition: Composition
    population: Population
    blocks: Annotated[Blocks | None, Field(exclude_if=lambda blocks: blocks is None)] = None


class Event(Section):
    """A recorded release, `count` times in a row; dp_accounting's own class and field names."""

    event: Annotated[dict[str, JsonValue], Field(min_length=1)]
    count: Annotated[int, Field(ge=1)]


class Commit(Section):
    """The commit of the code; dirty: other files than dvc.lock and params.yaml differed from it."""

    commit: Text
    dirty: bool


GENERATORS: Mapping[bool, Text] = {
    True: "AES-256 in counter mode, key from the operating system",
    False: "AES-256 in counter mode, seeded key, known to anyone: NOT private",
}
"""Where noise comes from, in words, by whether it is private."""


class NoiseGenerator(Section):
    """private: whether the generator's state was secret and unpredictable. generator: the same in words."""

    generator: Text
    private: bool

    @property
    def kind(self) -> Literal["secure", "seeded"]:
        """As the plan and the ledger's row call it."""
        return "secure" if self.private else "seeded"


class Implementation(Section):
    """What ran. recorded: the stage during which python, packages and git were looked up."""

    recorded: Literal["training", "report"]
    python: Text
    packages: Annotated[dict[str, Text], Field(min_length=1)]
    git: Commit | None
    device: Text
    noise: NoiseGenerator
    floating_point: Text


class Evidence(Section):
    """What the card can be checked against. card_sha256: of the card as canonical JSON without this field."""

    run_id: Text
    ledger_head: Text
    files: dict[Literal["model.safetensors", "plan.json", "trace.parquet"], Sha256]
    card_sha256: Sha256

    @model_validator(mode="after")
    def _names_every_file(self) -> Self:
        if set(self.files) != set(RELEASED):
            raise ValueError(f"files must hold {', '.join(RELEASED)}")
        return self


class Responsibility(Section):
    """What the promise needs from the owner of the data. contact: whom to ask, as far as the data card says."""

    owner_must: Texts
    contact: Text


class PrivacyCard(Section):
    """What a run's guarantee is, how it came about and how to recompute it."""

    setting: Setting
    scope: Scope
    mechanism: Mechanism
    accounting: Accounting
    events: Annotated[tuple[Event, ...], Field(min_length=1)]
    implementation: Implementation
    evidence: Evidence
    responsibility: Responsibility

    def to_json(self) -> dict[str, Any]:
        """The card as JSON values."""
        document: dict[str, Any] = self.model_dump(mode="json")
        return document

"""The form of a privacy card: typed facts, no sentences, and the owner's signature over all of them.

Every field is required, none may be empty, and no other is allowed. Numbers are finite; null is where a number
would be infinite, and where there is nothing to state.
"""

import json
import math
from collections.abc import Mapping
from typing import Annotated, Final, Literal, Self, TypeAlias

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from pydantic import Field, JsonValue, StringConstraints, model_validator

from algorithms.privacy.accounting import Accountant, EventRow
from algorithms.privacy.accounting.events import Schedule, check_payments, schedule_from_json
from algorithms.privacy.documents import (
    Account,
    AdjacencyName,
    Amount,
    BlockSection,
    Count,
    EncoderSection,
    Name,
    NotNegative,
    Positive,
    Probability,
    Section,
    Settings,
    Sha256,
    SoftwareFacts,
)
from algorithms.privacy.ledger import Composition as Rule
from algorithms.privacy.mechanisms.noise import GRID_BITS

SCHEMA_VERSION: Final = 2
RELEASED = ("model.safetensors", "plan.json", "trace.parquet")
"""The files that a run publishes and whose checksums its card holds."""
EVALUATION = "evaluation.json"
"""The histogram that was released of private held-out records, beside them."""

MAX_ORDER = 1e5
"""The largest order of a Renyi filter: a sample's bound is a sum of as many terms, and filters take an order of the
accountant."""

Guarantee: TypeAlias = Literal["private", "seeded", "diagnosed", "none"]
"""What a run promises.

- "private": differential privacy with the stated epsilon and delta.
- "seeded": nothing, as anyone can compute the noise from a public seed.
- "diagnosed": nothing, as diagnostics or a setting were computed from the records without noise; the noise is secret.
- "none": nothing, as there was no noise.
"""


class Signature(Section):
    """An Ed25519 signature over the bytes of the card with null in this place; both parts in hexadecimal."""

    public_key: Sha256
    value: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{128}$")]


def public_key_of(key: Ed25519PrivateKey) -> str:
    """The public half of a key, as cards and ledgers name it: 64 hexadecimal digits."""
    return key.public_key().public_bytes_raw().hex()


class Setting(Section):
    """What is promised, about whose data.

    epsilon: null unless the guarantee is "private". unit: what one record is. records: how many were trained on, where
    the data card declares that public. holdout: what the metrics were measured on: records that the data card declares
    public, or private ones, of whom one noised histogram left. evaluation_epsilon: what those people may lose.
    holdout_why: why records of a private data set are public. per_person: how many of them can be
    of one person, where the data card names the person. rows_per_user: how many rows of a person at most were one of
    them, where they were several; rows were chosen by a keyed hash of each. unit_is_stated: whether it is the caller's
    statement alone that each record is all of one unit. each_record_alone: true where code of the owner's own read the
    records, and the owner declared that it reads each by itself, which nothing has checked.
    """

    guarantee: Guarantee
    epsilon: NotNegative | None
    delta: Probability
    adjacency: AdjacencyName
    unit: Name
    dataset: Name
    title: Name
    source: Name
    licence: Name
    population: Name
    public_records: bool
    records: Count | None
    holdout: Literal["public", "private", "none"]
    per_person: Count | None = Field(default=None, exclude_if=lambda value: value is None)
    rows_per_user: Count | None = Field(default=None, alias="pooled", exclude_if=lambda value: value is None)
    unit_is_stated: bool = Field(default=False, exclude_if=lambda value: not value)
    each_record_alone: Literal[True] | None = Field(default=None, exclude_if=lambda value: value is None)
    holdout_why: Name | None = Field(default=None, exclude_if=lambda value: value is None)
    evaluation_epsilon: NotNegative | None = Field(default=None, exclude_if=lambda value: value is None)

    @property
    def private(self) -> bool:
        """Whether differential privacy is promised."""
        return self.guarantee == "private"


class ModelSection(Section):
    """The trained model.

    parameters: how many numbers it has. start: checksum of the file it starts from, which may be in it whole; null for
    one that starts from its seed. files: checksums of what else it is made of. reinitialize: what the start does not
    give. frozen: what is not trained. augmentations: views of each record, by which its gradient is averaged.
    """

    name: Name
    seed: int
    parameters: Count
    precision: Literal["float32", "bfloat16"]
    settings: Settings
    start: Sha256 | None
    files: dict[str, Sha256]
    reinitialize: tuple[Name, ...]
    frozen: tuple[Name, ...]
    augmentations: Count


class FeaturesSection(Section):
    """What was learned from the records before training, by noised releases of its own; "none" for nothing."""

    name: Name
    settings: Settings


class Span(Section):
    """The least and the most that a number was during the run; null for an infinite one."""

    least: NotNegative | None
    most: NotNegative | None


class QuerySection(Section):
    """Releases of one kind. clip_norm: bound of one record. noise_std: on the sum, before it is divided."""

    kind: Name
    sampling: Name
    clipping: Name
    noise: Name
    count: Count
    sampling_rate: Span
    clip_norm: Span
    noise_multiplier: Span
    noise_std: Span
    divisor: Span


class PaperProtocolSection(Section):
    """A paper whose choices a setting makes: the values that the run had, and which of them are not the paper's."""

    paper: Name
    settings: Settings
    departures: tuple[Name, ...]


class SelectionSection(Section):
    """How far a noisy choice among candidates is from a uniform draw, by public numbers alone.

    gain: the stated signal, how far the best candidate's total loss lies below all others: the mean that one choice can
    gain at most. distance: in total variation, at that gain. Both are null where the number of records is private.
    """

    candidates: Count
    noise_scale: Positive
    gain: NotNegative | None
    distance: Probability | None


class MechanismSection(Section):
    """What was asked of the records.

    transform, encoder, features: what each record was made into by itself, and what was learned from all. diagnostics:
    whether norms of exact gradients were stored. settings_from_records: whether a setting was computed from the records
    without noise. noise_multiplier: null where it was chosen adaptively, with what it was in `queries`. paper_protocol:
    only of a run with a paper's choices. selection_law: only of a method that chooses by noisy losses.
    """

    transform: Literal["none", "scattering", "encoder"]
    encoder: EncoderSection | None
    features: FeaturesSection
    diagnostics: bool
    settings_from_records: bool
    algorithm: Name
    settings: Settings
    model: ModelSection
    steps: Count
    releases: Count
    noise_multiplier: NotNegative | None
    sampling_rate: Probability
    divisor: Positive | None
    queries: Annotated[tuple[QuerySection, ...], Field(min_length=1)]
    paper_protocol: PaperProtocolSection | None = Field(default=None, exclude_if=lambda value: value is None)
    selection_law: SelectionSection | None = Field(default=None, exclude_if=lambda value: value is None)


class Costs(Section):
    """Epsilon of the recorded events, or of the filter they were held to; null where there is no finite bound."""

    pld: NotNegative | None
    rdp: NotNegative | None
    pure: NotNegative | None


ACCOUNTANT_PHRASES = {"pld": "by PLD", "rdp": "by RDP", "pure": "at delta 0"}
"""How people are told of these epsilons: "epsilon by PLD", and a pure one "epsilon at delta 0"."""


def words_by(costs: Mapping[str, float | None]) -> dict[str, str]:
    """`ACCOUNTANT_PHRASES` for these epsilons, of which PLD's is RDP's where it knows losses down to some delta only.

    Example:
        >>> words_by({"pld": 1.5, "rdp": 1.5})["pld"]
        'by PLD (by RDP here, as PLD has no bound at this delta)'
    """
    pld = costs.get("pld")
    is_by_rdp = pld is not None and 0 < pld < math.inf and pld == costs.get("rdp")
    return (
        ACCOUNTANT_PHRASES
        | {"pld": f"{ACCOUNTANT_PHRASES['pld']} (by RDP here, as PLD has no bound at this delta)"}
        if is_by_rdp
        else ACCOUNTANT_PHRASES
    )


class Discretisation(Section):
    """pld_interval: grid of the privacy losses, or null where Rényi bounds take their place. rdp: orders tried."""

    pld_interval: Positive | None
    rdp_lowest_order: Positive
    rdp_highest_order: Positive
    rdp_orders: Count


class CompositionSection(Section):
    """How the releases of the run add up: fixed in advance, or chosen adaptively under a filter.

    rho: the limit of a zCDP filter. order, limit: of a Rényi filter.
    """

    kind: Literal["schedule", "zcdp", "renyi"]
    rho: Positive | None
    order: Annotated[float, Field(gt=1, le=MAX_ORDER)] | None
    limit: Positive | None

    @model_validator(mode="after")
    def _has_what_its_filter_needs(self) -> Self:
        stated = {name for name in ("rho", "order", "limit") if getattr(self, name) is not None}
        if stated != {"schedule": set(), "zcdp": {"rho"}, "renyi": {"order", "limit"}}[self.kind]:
            raise ValueError("rho belongs to a zcdp filter, order and limit to a renyi filter")
        return self


class Blocks(Section):
    """The blocks that a run was charged to. blocks_per_person: in how many a person may have records."""

    charged: Annotated[tuple[BlockSection, ...], Field(min_length=1)]
    blocks_per_person: Count


class Accounting(Section):
    """How epsilon was computed and what it was charged to.

    accountant: whose epsilon the run was held to. across_runs: how the population's runs add up. population: its
    account, or of one with blocks that of the block of which the greatest share is charged. blocks: null for a run on a
    whole population.
    """

    accountant: Accountant
    epsilon: Costs
    delta: Probability
    target: Amount
    library: Literal["dp-accounting"]
    library_version: Name
    discretisation: Discretisation
    composition: CompositionSection
    across_runs: Rule
    population: Account
    blocks: Blocks | None


class Event(Section):
    """A recorded release, `count` times in a row; dp_accounting's own class and field names."""

    event: Annotated[Settings, Field(min_length=1)]
    count: Count


class Rounding(Section):
    """What the arithmetic does to the guarantee.

    grid_bits: the noised sum and the noise are whole numbers of steps of at most 2^-grid_bits of the noise.
    sum_bits: in which contributions are added up. laplace_error_bits: the likelihood of a Laplace draw within
    laplace_scales scales is off by less than one part in 2^laplace_error_bits, which is in no epsilon and no delta.
    """

    grid_bits: Count
    sum_bits: Count
    laplace_scales: Count
    laplace_error_bits: Count


ROUNDING = Rounding(grid_bits=GRID_BITS, sum_bits=64, laplace_scales=64, laplace_error_bits=18)
"""What this code does."""


class Implementation(SoftwareFacts):
    """What ran.

    noise: "secure" where its key was secret, from the operating system. cipher: of noise and coins. rounding: null
    without noise.
    """

    device: Name
    noise: Literal["secure", "seeded"]
    cipher: Literal["AES-256-CTR"]
    rounding: Rounding | None


class Evidence(Section):
    """What the card can be checked against: the ledger's last hash, and the checksums of the files beside the card.

    ledger_head: null where no ledger kept the run, as of a call in a notebook that names no population.
    """

    run_id: Name
    ledger_head: Sha256 | None
    files: Annotated[
        dict[Literal["model.safetensors", "plan.json", "trace.parquet", "evaluation.json"], Sha256],
        Field(min_length=len(RELEASED)),
    ]

    @model_validator(mode="after")
    def _has_what_every_run_publishes(self) -> Self:
        if not self.files.keys() >= {*RELEASED}:
            raise ValueError(f"files must have the checksums of {', '.join(RELEASED)}")
        return self


class PrivacyCard(Section):
    """What a run's guarantee is, how it came about and how to recompute it.

    signature: the owner's, over all other facts, by the one way in which they are written; null where no owner's key
    was at hand: such a card shows nobody who made it.
    """

    schema_version: Literal[2]
    signature: Signature | None
    setting: Setting
    mechanism: MechanismSection
    accounting: Accounting
    events: Annotated[tuple[Event, ...], Field(min_length=1)]
    implementation: Implementation
    evidence: Evidence

    @property
    def cost(self) -> float | None:
        """Epsilon by the accountant that the run was held to, also where the guarantee is not "private"."""
        cost: float | None = getattr(self.accounting.epsilon, self.accounting.accountant)
        return cost

    @property
    def schedule(self) -> Schedule:
        """The recorded releases; raises RefusedError for unknown events and unpaid ones."""
        schedule = schedule_from_json([EventRow(event=row.event, count=row.count) for row in self.events])
        check_payments(schedule)
        return schedule

    def to_json(self) -> dict[str, JsonValue]:
        """The facts as JSON values."""
        return self.model_dump(mode="json")

    def to_bytes(self) -> bytes:
        """The facts as the file that holds them: these bytes and no others."""
        return (json.dumps(self.to_json(), indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()

    def sign(self, key: Ed25519PrivateKey | None) -> Self:
        """The same facts, signed; unsigned without a key."""
        bare = self.model_copy(update={"signature": None})
        if key is None:
            return bare
        value = key.sign(bare.to_bytes()).hex()
        return bare.model_copy(update={"signature": Signature(public_key=public_key_of(key), value=value)})

    def signature_holds(self) -> bool:
        """Whether the facts are those that the holder of the named key signed."""
        if self.signature is None:
            return False
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(self.signature.public_key))
        try:
            key.verify(bytes.fromhex(self.signature.value), self.sign(None).to_bytes())
        except InvalidSignature:
            return False
        return True

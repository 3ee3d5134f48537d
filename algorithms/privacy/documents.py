"""The documents of a run: its plan, its receipt, and what is known of its data.

Their fields are the keys of the files. A privacy card is made from them, and has some of their parts.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeAlias

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    PlainSerializer,
    StringConstraints,
    ValidationError,
    model_validator,
)

from algorithms.errors import RefusedError
from algorithms.privacy.accounting import Accountant, EventRow
from algorithms.privacy.ledger import Composition

# What computes costs is imported where it is used: a document is also read by who computes none, and SciPy takes long.
if TYPE_CHECKING:
    from algorithms.privacy.accounting.events import Schedule
    from algorithms.privacy.accounting.filters import FilterSpec
else:
    FilterSpec = Any  # which `_filter_of` makes or checks

Name: TypeAlias = Annotated[str, StringConstraints(pattern=r"\S")]
Sha256: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
NotNegative: TypeAlias = Annotated[float, Field(ge=0)]
Positive: TypeAlias = Annotated[float, Field(gt=0)]
Count: TypeAlias = Annotated[int, Field(ge=1)]
Probability: TypeAlias = Annotated[float, Field(ge=0, le=1)]
AdjacencyName: TypeAlias = Literal["ADD_OR_REMOVE_ONE", "REPLACE_ONE"]
Settings: TypeAlias = dict[str, JsonValue]
Number: TypeAlias = int | float
"""A number that is written as it was made: 4 stays 4, and 4.0 stays 4.0, since a run's id covers its plan."""


class Section(BaseModel):
    """A part of a card, and of a receipt where a card states the same."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, serialize_by_alias=True
    )


class Amount(Section):
    """An (epsilon, delta) pair; epsilon is null where it is infinite."""

    epsilon: NotNegative | None
    delta: Probability


class Account(Section):
    """A budget right after the run was settled, as the ledger had it."""

    cap: Amount
    spent: Amount
    remaining: Amount


class BlockSection(Account):
    """The account of a block."""

    name: Name


class EncoderSection(Section):
    """A frozen public network, whose features of each record took the record's place, or a tokenizer, whose tokens did.

    width: how many features or tokens. sha256: of the file of its weights or of its vocabulary. settings: as JSON text.
    pretrained_on: what its author says, or "unknown". tokens, padding: of a tokenizer, the size of its vocabulary and
    the entry that fills up a text.
    """

    name: Name
    takes: Literal["images", "texts"]
    width: Count
    sha256: Sha256
    pretrained_on: Name
    settings: Name
    tokens: Count | None = Field(default=None, exclude_if=lambda value: value is None)
    padding: int = Field(default=0, ge=0, exclude_if=lambda value: value == 0)


class Commit(Section):
    """The commit of the code; dirty: other files than dvc.lock and params.yaml differed from it."""

    commit: Name
    dirty: bool


class SoftwareFacts(Section):
    """The software that trained. recorded: the stage that looked up what follows.

    version: of epsilonflow. code: SHA-256 of the source that decides a result. Cards of older versions have neither.
    packages: their versions, by name. git: null outside a checkout.
    """

    recorded: Literal["training", "report"]
    version: Name | None = Field(default=None, exclude_if=lambda value: value is None)
    code: Sha256 | None = Field(default=None, exclude_if=lambda value: value is None)
    python: Name
    packages: Annotated[dict[str, Name], Field(min_length=1)]
    git: Commit | None


class Document(BaseModel):
    """A document of a run; one that lacks an entry is of another version."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False, serialize_by_alias=True)

    @classmethod
    def from_json(cls, content: str | bytes, where: str) -> Self:
        """Parse a document; raises RefusedError if it lacks an entry. where: the name of its file.

        A text is not taken for a number, nor a number for a flag.
        """
        try:
            return cls.model_validate_json(content, strict=True)
        except ValidationError as error:
            first = error.errors()[0]
            entry = ".".join(map(str, first["loc"])) or "the whole"
            raise RefusedError(
                "{where} does not say what is needed of {entry!r} ({why}); use one version for {run.steps}.",
                code="document_incomplete",
                where=where,
                entry=entry,
                why=first["msg"],
            ) from None

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a document; raises RefusedError if it lacks an entry, and OSError if there is no file."""
        return cls.from_json(path.read_bytes(), str(path))

    def to_json(self) -> dict[str, JsonValue]:
        """The document as JSON values."""
        return self.model_dump(mode="json")

    def to_text(self, *, sort_keys: bool = False) -> str:
        """The content of its file."""
        return json.dumps(self.to_json(), indent=2, sort_keys=sort_keys) + "\n"


class DataFacts(Document):
    """What a card states of the data, from their description or from the caller.

    The fields that a card has, too, are described there: see `Setting` and `Mechanism` in `card.schema`.
    """

    dataset: str
    title: str
    source: str
    licence: str
    unit: str
    public_records: bool = Field(alias="public")
    records: int | None
    holdout: Literal["public", "private", "none"]
    holdout_why: str | None = None
    transform: Literal["none", "scattering", "encoder"]
    encoder: EncoderSection | None = None
    per_person: int | None = None
    rows_per_user: int | None = Field(default=None, alias="pooled")
    unit_is_stated: bool = False
    each_record_alone: Literal[True] | None = None


class PlannedModel(Document):
    """The model in a plan: the settings of params.yaml, and what calibration found.

    Further settings, which no card states, such as weights of classes, are carried along: they decide the run's id.

    Attributes:
        name, seed, precision, settings: Of the architecture and its initial parameters.
        start: The path of a file with the initial parameters.
        reinitialize, freeze: The layers or parameters that the start does not give, and that are not trained.
        augmentations: Views of each image, over which its gradient is averaged.
        files: The SHA-256 of each file that is named above, by its key.
        parameters: How many numbers are trained or frozen.
        notes: Public sentences on the start and on frozen parameters.
    """

    model_config = ConfigDict(extra="allow")

    name: str
    seed: int
    precision: Literal["float32", "bfloat16"] = "float32"
    settings: Settings = {}
    start: str | None = None
    reinitialize: tuple[str, ...] = ()
    freeze: tuple[str, ...] = ()
    augmentations: int = 1
    files: dict[str, str] = {}
    parameters: int
    notes: tuple[str, ...] = ()


class StatedTrials(Document):
    """How the number of a search's trials is drawn: see `accounting.events.Trials`; without a shape by Poisson."""

    mean: Number
    shape: Number | None


class StatedEvaluation(Document):
    """The planned release of private held-out records.

    Attributes:
        spec: The histogram, see `algorithms.evaluation.HistogramSpec`.
        noise: The kind of noise.
        noise_multiplier: Its scale over the histogram's sensitivity.
        epsilon: What the people held out may lose, at the run's delta.
        schedule: The release as an event, or all that a search makes.
        trials: Of a search, each of whose trials makes the release: how their number is drawn, or the number.
    """

    spec: Settings
    noise: Literal["gaussian", "laplace"]
    noise_multiplier: Number
    epsilon: Number
    schedule: tuple[EventRow, ...]
    trials: StatedTrials | int | None = Field(default=None, exclude_if=lambda value: value is None)


def _filter_of(stated: object) -> object:
    from algorithms.privacy.accounting import filters

    if isinstance(stated, dict):
        return filters.filter_from_json(stated)
    if not isinstance(stated, filters.FilterSpec):
        raise ValueError("a filter is stated by its kind and its numbers")
    return stated


def _filter_to_json(spec: "FilterSpec") -> dict[str, str | float]:
    from algorithms.privacy.accounting.filters import filter_to_json

    return filter_to_json(spec)


class StatedPlan(Document):
    """The releases of a run and what they cost, as `algorithms.core.plan.Plan` decides them.

    Attributes:
        target: The epsilon and delta that the run may cost.
        accountant: Whose epsilon must meet the target.
        count_noise: The noise multiplier of a count of the records that is released first.
        prior_events: The releases before the method's own.
        public: What the method may use before its first release, see `algorithms.core.planning_facts`.
        adjacency: The name of the relation of neighbouring data sets.
        delta: That of the target.
        epsilon: The cost by accountant; None for a run without noise.
        steps: The largest number of training steps.
        noise_multiplier: Of each step; None where it is chosen adaptively.
        sampling_rate: The probability that a record is in a step's sample.
        divisor: The number that sums are divided by; None if a released count decides it.
        schedule: The releases, in their order.
        filter: What enforces the budget: "kind" and its numbers.
        method_params: Public values that the method planned.
        not_private: Why the stated epsilon does not hold; None where it does.
        evaluation: The release of private held-out records; None without one.
    """

    target: Amount
    accountant: Accountant
    count_noise: Number
    prior_events: tuple[EventRow, ...]
    public: dict[str, JsonValue]
    adjacency: str
    delta: float
    epsilon: dict[str, float | None]
    steps: int
    noise_multiplier: Number | None
    sampling_rate: Number
    divisor: Number | None
    schedule: tuple[EventRow, ...]
    filter: Annotated[FilterSpec, BeforeValidator(_filter_of), PlainSerializer(_filter_to_json)]
    method_params: dict[str, JsonValue] = {}
    not_private: str | None
    evaluation: StatedEvaluation | None = Field(default=None, exclude_if=lambda value: value is None)


class SearchFacts(Document):
    """What the plan of a search adds to that of its winner.

    Attributes:
        shows_all: Whether all trials are released.
        each: The epsilon that one trial was planned for.
        shares: Whether all trials share features that are learned once.
        space: The number of settings to choose from.
    """

    shows_all: bool
    each: float
    shares: bool
    space: int


class PlanDocument(StatedPlan):
    """plan.json: what a run was asked to do, and the plan that meets it.

    Attributes:
        attack: The attack that the noise withstands, as rates from 0 to 1; None where an epsilon was asked for.
        algorithm, settings: The method and its settings.
        features: What is learned before training: "name", beside its settings.
        code: SHA-256 of the source of the method, and of features and a model of the user's own.
        model: The model.
        dataset: The data set's name.
        noise: "secure" if its key is secret, "seeded" if anyone can draw it again.
        diagnostics: Whether norms of exact gradients are stored; None in plans that do not state it.
        held_out: The settings of the evaluation of private held-out records; None without one.
        search: Of a search's winner alone.
    """

    attack: dict[str, float] | None = None
    algorithm: str
    settings: Settings
    features: Settings
    code: dict[str, str] = {}
    model: PlannedModel
    dataset: str
    noise: Literal["secure", "seeded"]
    diagnostics: bool | None = Field(default=None, exclude_if=lambda value: value is None)
    held_out: Settings | None = Field(default=None, exclude_if=lambda value: value is None)
    search: SearchFacts | None = Field(default=None, exclude_if=lambda value: value is None)

    @property
    def ledger_notes(self) -> dict[str, str]:
        """What the ledger's rows say of the run."""
        return {
            "algorithm": self.algorithm,
            "dataset": self.dataset,
            "adjacency": self.adjacency,
            "noise": self.noise,
        }


class RunAccount(Account):
    """The balances right after a run was settled.

    Those of the population, or of the block of which the greatest share is charged, and of each block of the run.

    Attributes:
        first, head: The hashes of the first and the latest row of the ledger's chain; None where no ledger is kept.
        composition: How the population's runs add up.
        ten_more: What will be spent after ten more runs like this; None in receipts that do not state it.
        blocks_per_person: In how many blocks a person may have records; None for a population without blocks.
        blocks: The blocks that the run was charged to, with their balances; empty for a population without blocks.
    """

    first: str | None = None
    head: str | None
    composition: Annotated[Composition, PlainSerializer(Composition.to_json)] = Composition()
    ten_more: Amount | None = Field(default=None, exclude_if=lambda value: value is None)
    blocks_per_person: int | None = Field(default=None, exclude_if=lambda value: value is None)
    blocks: tuple[BlockSection, ...] = Field(default=(), exclude_if=lambda value: not value)


class RunIdentity(Document):
    """The part of a receipt that is known before the run is charged.

    Attributes:
        run_id: The run's name in the ledger.
        algorithm: The method's name.
        dataset, population: Whose records were read, and whose budget paid.
        description_sha256: Of the description of the data; None for records in memory.
        blocks: Those that were read.
        private_noise: Whether the key of the noise is secret.
        diagnostics: Whether norms of exact gradients were stored, which is done for public records alone.
        device: The kind of device that trained, such as "cpu".
    """

    run_id: str
    algorithm: str
    dataset: str
    population: str
    description_sha256: str | None
    blocks: tuple[str, ...] = ()
    private_noise: bool
    diagnostics: bool
    device: str


class Receipt(RunIdentity):
    """What a run cost, with what noise, and the ledger that it was charged to.

    Attributes:
        steps: The largest number of training steps that was planned.
        releases: The number of rows of the noise trace.
        epsilon: The cost by accountant, at `delta`; None where there is no finite bound.
        accountant: Whose epsilon was charged.
        events: The recorded releases, in their order.
        ledger: The balances right after the settlement.
        evaluation_epsilon: What people held out may lose at most; None where no release was made of them.
        software: What trained.
        sha256: Checksums of the files of the result, by name.
    """

    steps: Count
    releases: int
    epsilon: dict[str, NotNegative | None]
    accountant: Accountant
    delta: Probability
    events: tuple[EventRow, ...]
    ledger: RunAccount
    evaluation_epsilon: NotNegative | None = Field(default=None, exclude_if=lambda value: value is None)
    software: SoftwareFacts
    sha256: dict[str, str]

    @model_validator(mode="after")
    def _has_the_epsilon_that_was_charged(self) -> Self:
        if self.accountant not in self.epsilon:
            raise ValueError(f"epsilon must have the cost by {self.accountant}")
        return self

    @property
    def cost(self) -> float | None:
        """The epsilon that was charged; None for a run without noise."""
        return self.epsilon[self.accountant]

    @property
    def schedule(self) -> "Schedule":
        """The recorded releases as events."""
        from algorithms.privacy.accounting.events import schedule_from_json

        return schedule_from_json(self.events)

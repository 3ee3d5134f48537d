"""params.yaml as strict models: unknown keys, wrong types and impossible values are refused with the key's path.

A stage names the groups that it reads, and accessing another group is an error. So the groups that a stage reads can be
compared with those that dvc.yaml lists for it.
"""

import os
import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails

from algorithms.errors import RefusedError
from algorithms.privacy.accounting import MAX_EPSILON
from data.description import Transform
from data.documents import CONTRADICTION, Document, DocumentError, contradiction, load_yaml

_PASSWORD = re.compile(r"://[^/@]*:[^@]*@|[?&](ssl)?password=")
_WANDB_MODES: Mapping[str, Literal["offline", "online", "disabled"]] = {
    "online": "online",
    "run": "online",
    "offline": "offline",
    "dryrun": "offline",
    "disabled": "disabled",
}
"""The values of WANDB_MODE that W&B documents, and the modes that they stand for."""

Word = Annotated[str, Field(min_length=1)]


class StrictModel(BaseModel):
    """One group of params.yaml."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class EncoderParams(StrictModel):
    """A frozen public network; the model is trained on its features of each record (data.transform: encoder).

    name: efficientnet-lite0, wordllama, all-minilm-l6-v2, timm/NAME, torchvision/NAME, huggingface/NAME or its folder,
    tokenizer/NAME or its folder for the tokens of a public model, or package.module:factory. checkpoint: for timm and
    torchvision, a safetensors file of the weights. settings: size and mirror for images, length and layer for texts.
    """

    name: str = Field(min_length=1)
    checkpoint: str | None = Field(default=None, min_length=1)
    settings: dict[str, JsonValue] = Field(default_factory=dict)


class DataParams(StrictModel):
    """Which records, and what is computed from each of them by itself.

    dataset: the name of a data card. transform: none, scattering (for images) or encoder. encoder: the encoder, if
    transform is encoder. blocks: the blocks to train on, if the data card declares blocks; empty for all.
    """

    dataset: str = Field(min_length=1)
    transform: Transform = "none"
    encoder: EncoderParams | None = None
    blocks: list[Word] = Field(default_factory=list)

    @model_validator(mode="after")
    def _has_an_encoder_where_it_encodes(self) -> Self:
        if (self.transform == "encoder") != (self.encoder is not None):
            raise contradiction(
                "data.encoder names the encoder of data.transform: encoder; give both or neither",
                "transform",
                "encoder",
            )
        return self


class AttackTarget(StrictModel):
    """A target instead of epsilon: at this false positive rate no attacker has a larger true positive rate.

    false_alarms: the false positive rate, the share of strangers whom the attacker takes for members. caught: the true
    positive rate, the share of members that it recognises.
    """

    false_alarms: float = Field(gt=0, lt=1)
    caught: float = Field(gt=0, lt=1)

    @model_validator(mode="after")
    def _is_above_guessing(self) -> Self:
        if self.caught <= self.false_alarms:
            raise contradiction(
                "caught must be above false_alarms, which blind guessing reaches", "caught", "false_alarms"
            )
        return self


class EvaluationParams(StrictModel):
    """The release of the held-out records, where the data card says that they are private.

    epsilon: what the people held out may lose, at the run's delta; null for as much as those trained on, which costs
    nothing more. by: columns of the data card by whose values metrics are given, too. cross: whether by all
    combinations of these values. compare_with: the file of another model, whose difference to the new one on the same
    people is released, too. recalibrate: whether the model's probabilities of classes get a temperature from the
    same release if it helps beyond the noise.
    """

    epsilon: float | None = Field(default=None, gt=0, le=MAX_EPSILON)
    by: list[Word] = Field(default_factory=list)
    cross: bool = False
    compare_with: str | None = Field(default=None, min_length=1, exclude_if=lambda value: value is None)
    recalibrate: bool = Field(default=False, exclude_if=lambda value: not value)


class PrivacyParams(StrictModel):
    """The target of a run: either an epsilon or an attack that it must withstand.

    epsilon: of the whole run. target: instead, an attack that the run withstands. delta: of the guarantee; 0 with the
    accountant "pure" alone. accountant: whose epsilon must meet the target: "pld" by privacy loss distributions, or by
    Rényi divergences where these have no bound, "rdp" by Rényi divergences, "pure" for delta 0. count_noise: noise
    multiplier of the number of records, which is released if it is private. noise: "seeded" is for tests and
    comparisons; its results are not private. diagnostics: record what clipping and noise did to each gradient; only for
    public records, and the run is not private. evaluation: the release of private held-out records.
    """

    epsilon: float | None = Field(default=None, gt=0, le=MAX_EPSILON)
    target: AttackTarget | None = None
    delta: float = Field(ge=0, lt=1)
    accountant: Literal["pld", "rdp", "pure"] = "pld"
    noise: Literal["secure", "seeded"] = "secure"
    count_noise: float = Field(default=100.0, gt=0, le=1e9)
    diagnostics: bool = False
    evaluation: EvaluationParams = Field(
        default_factory=EvaluationParams, exclude_if=lambda evaluation: evaluation == EvaluationParams()
    )

    @model_validator(mode="after")
    def _has_one_target(self) -> Self:
        if (self.epsilon is None) == (self.target is None):
            raise contradiction(
                "set either privacy.epsilon or privacy.target, and the other to null", "epsilon", "target"
            )
        return self


class ModelParams(StrictModel):
    """Which model, its initial parameters, and which of them are trained.

    name: a model of the catalogue. seed: of the random initial parameters; public. precision: of the gradients.
    settings: the settings of this model. start: a safetensors file with the initial parameters, of a public model or
    an earlier release. reinitialize: layers or parameters, by name, to initialise at random instead. freeze: layers or
    parameters not to train. class_weights: by class, how much a record of it counts in training; 1 for classes that are
    not named. augmentations: views of each image, over which its gradient is averaged. checkpoint, adapter,
    replace_batch_norm: settings of the models timm and huggingface.

    The plan records the SHA-256 of every file that is named here, and training refuses another file under the same
    name. DVC does not watch these files, so give a changed file a new name.
    """

    name: str = Field(min_length=1)
    seed: int = Field(default=0, ge=0, lt=2**63)
    precision: Literal["float32", "bfloat16"] = "float32"
    settings: dict[str, JsonValue] = Field(default_factory=dict)
    start: str | None = Field(default=None, min_length=1)
    reinitialize: list[Word] = Field(default_factory=list)
    freeze: list[Word] = Field(default_factory=list)
    augmentations: int = Field(default=1, ge=1)
    class_weights: dict[str, Annotated[float, Field(gt=0)]] | None = Field(
        default=None, min_length=1, exclude_if=lambda value: value is None
    )
    checkpoint: str | None = Field(default=None, min_length=1, exclude_if=lambda value: value is None)
    adapter: dict[str, JsonValue] | None = Field(default=None, exclude_if=lambda value: value is None)
    replace_batch_norm: bool | Literal["frozen"] | None = Field(
        default=None, exclude_if=lambda value: value is None
    )

    @model_validator(mode="after")
    def _says_a_setting_once(self) -> Self:
        for key in self.settings.keys() & self._of_libraries.keys():
            raise contradiction(
                f"model.{key} and model.settings.{key} are both given; leave one out", key, f"settings.{key}"
            )
        return self

    @property
    def _of_libraries(self) -> dict[str, JsonValue]:
        settings: dict[str, JsonValue] = {
            "checkpoint": self.checkpoint,
            "adapter": self.adapter,
            "replace_batch_norm": self.replace_batch_norm,
        }
        return {key: value for key, value in settings.items() if value is not None}

    @property
    def all_settings(self) -> dict[str, JsonValue]:
        """All settings of the model."""
        return self.settings | self._of_libraries


class MemoryParams(StrictModel):
    """The settings of `Performance` that a run of a comparison has, too."""

    memory_mb: int = Field(default=1024, ge=1)
    physical_batch: int | None = Field(default=None, ge=1)


class Performance(MemoryParams):
    """Settings that do not change the result, except for rounding.

    device: auto, cpu, or the name of an accelerator that PyTorch sees, such as cuda. memory_mb: memory for per-record
    gradients. physical_batch: records per pass, by default as memory_mb allows; rounded down to a multiple of 64, or to
    32 or 1. workers: parallel passes on a CPU; auto: one per core, or one per two cores if a pass may use two threads.
    processes: training processes on this machine, each on a shard of the records, one per GPU. shard_frozen: whether
    each of several processes keeps a shard of the model's frozen parameters (FSDP2), for a model that does not fit one
    GPU. shard_trained: the same for trained parameters, sums and the optimizer's state. offload: whether trained
    parameters, sums and the optimizer's state stay in main memory, and a layer's weights are copied to the GPU when it
    needs them. accept_rounding: whether private records are trained on where the last bits of an accelerator's
    gradients depend on the other records of a pass; the card states it. threads: of PyTorch in each pass, at most
    as many as keep a record's gradient apart from its place in the batch, and one in a short pass. checkpoint_seconds:
    time between checkpoints.
    """

    device: str = Field(default="auto", min_length=1)
    workers: Literal["auto"] | Annotated[int, Field(ge=1)] = "auto"
    processes: int = Field(default=1, ge=1)
    shard_frozen: bool = False
    shard_trained: bool = False
    offload: bool = False
    accept_rounding: bool = False
    threads: int | None = Field(default=None, ge=1)
    checkpoint_seconds: float = Field(default=10.0, gt=0)

    @model_validator(mode="after")
    def _offload_or_shard(self) -> Self:
        if self.offload and (self.shard_frozen or self.shard_trained):
            raise contradiction(
                "offload keeps parameters in main memory, and shard_frozen and shard_trained divide them between GPUs;"
                " keep one of the two",
                "offload",
                "shard_frozen",
                "shard_trained",
            )
        return self


class Tracking(StrictModel):
    """Where Weights & Biases stores the runs.

    project: its name there. mode: offline stores runs in .wandb, online sends them, disabled makes none. entity: a user
    or a team.

    Where the environment has WANDB_MODE, `load` takes the mode from there, as W&B's own tools do.
    """

    project: str = Field(default="epsilonflow", min_length=1)
    mode: Literal["offline", "online", "disabled"] = "offline"
    entity: str | None = Field(default=None, min_length=1)

    def in_environment(self) -> "Tracking":
        """These settings with the mode that WANDB_MODE names; raises ParamsRefusedError for one that W&B lacks."""
        named = os.environ.get("WANDB_MODE", "").strip().lower()
        if named and named not in _WANDB_MODES:
            raise ParamsRefusedError(
                "the environment's WANDB_MODE is {value!r}; set it to online, offline or disabled, or unset it.",
                code="bad_variable",
                value=named,
                variable="WANDB_MODE",
            )
        return self.model_copy(update={"mode": _WANDB_MODES[named]}) if named else self


class LedgerLocation(StrictModel):
    """Where the ledger is. The data card names the population that is charged.

    url: without a password; by default an SQLite file in the data folder.
    """

    url: str | None = Field(default=None, min_length=1)

    @field_validator("url")
    @classmethod
    def _has_no_password(cls, url: str | None) -> str | None:
        if url and _PASSWORD.search(url):
            raise ValueError(
                "a password does not belong in a file; put the whole URL in EPSILONFLOW_LEDGER_URL"
            )
        return url


MODELS: Mapping[str, type[StrictModel]] = {
    "data": DataParams,
    "privacy": PrivacyParams,
    "model": ModelParams,
    "performance": Performance,
    "tracking": Tracking,
    "ledger": LedgerLocation,
}
GROUPS = ("data", "privacy", "features", "algorithm", "model", "performance", "tracking", "ledger")
OPTIONAL = ("features", "performance", "tracking", "ledger")


if TYPE_CHECKING:
    from algorithms.core.learned_features import FeatureLearner
    from algorithms.core.method import Algorithm


class ParamsRefusedError(RefusedError):
    """Parameters that cannot be used; the message names the key, what is wrong and what is allowed.

    code: a kind of KINDS in `tasks.refusals`. fields: `keys` are those that have to change.
    """


T = TypeVar("T")


class _Group(Generic[T]):
    """A group of Params, which only a stage that reads it has."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, params: "Params", owner: type) -> T:
        if self._name not in params.groups:
            group = self._name.removesuffix("_settings")
            raise LookupError(
                f"this stage reads the group {group!r}: add it to its READS and to its params in dvc.yaml"
            )
        value: T = params.groups[self._name]
        return value


class Params:
    """The groups that a stage reads; any other group raises LookupError.

    algorithm, features: what their groups make, features None for none; `_settings`: the groups as in params.yaml.
    """

    data = _Group[DataParams]()
    privacy = _Group[PrivacyParams]()
    algorithm = _Group["Algorithm[Any]"]()
    algorithm_settings = _Group[Mapping[str, JsonValue]]()
    features = _Group["FeatureLearner | None"]()
    features_settings = _Group[Mapping[str, JsonValue]]()
    model = _Group[ModelParams]()
    performance = _Group[Performance]()
    tracking = _Group[Tracking]()
    ledger = _Group[LedgerLocation]()

    def __init__(self, groups: Mapping[str, Any]) -> None:
        self.groups = groups

    @property
    def algorithm_name(self) -> str:
        """The name of the method, or `package.module:factory` for one of the user's own."""
        return str(self.algorithm_settings["name"])

    def with_epsilon(self, epsilon: float) -> "Params":
        """The same groups, with another target."""
        return Params({**self.groups, "privacy": self.privacy.model_copy(update={"epsilon": epsilon})})


def load(path: Path, *, reads: tuple[str, ...]) -> Params:
    """Load the named groups of the params.yaml at `path`; only these are validated.

    Raises ParamsRefusedError for a file that is not YAML, unknown keys, wrong types and impossible values, and another
    RefusedError for an unknown algorithm.
    """
    document = read_yaml(
        path,
        holds=f"the groups {', '.join(GROUPS)}, each with its keys",
        missing="run this in the folder that holds params.yaml",
    )
    return parse(document, reads=reads, name=path.name)


def read_yaml(path: Path, *, holds: str, missing: str) -> Document:
    """The mapping in a YAML file; raises ParamsRefusedError for any other file.

    holds: what it must hold. missing: what to do if there is no file.
    """
    try:
        document = load_yaml(path.read_text(encoding="utf-8"))
    except OSError:
        raise ParamsRefusedError(
            "there is no file {path}; {missing}.", code="missing_file", path=path, missing=missing
        ) from None
    except UnicodeDecodeError:
        raise ParamsRefusedError(
            "{name} is not valid YAML, which is UTF-8; correct it.",
            code="unreadable_file",
            name=path.name,
            path=path,
        ) from None
    except DocumentError as error:
        raise ParamsRefusedError(
            "{name} {problem}; correct it.",
            code="unreadable_file",
            name=path.name,
            problem=error,
            path=path,
            fault=error.code,
        ) from None
    if not isinstance(document, dict):
        raise ParamsRefusedError(
            "{name} must hold {holds}; correct it.",
            code="unreadable_file",
            name=path.name,
            holds=holds,
            path=path,
        )
    return document


def parse(
    document: Mapping[Any, Any], *, reads: tuple[str, ...] = GROUPS, name: str = "params.yaml"
) -> Params:
    """Validate the named groups of a parsed document; see `load`."""
    unknown = [str(key) for key in document if key not in GROUPS]
    if unknown:
        raise ParamsRefusedError(
            "{name}: unknown key {unknown}; the groups are {groups}.",
            code="bad_keys",
            name=name,
            unknown=unknown[0],
            groups=", ".join(GROUPS),
            keys=(unknown[0],),
        )
    groups = {group: _parse_group(document, group, name) for group in reads}
    raw_groups = {
        f"{group}_settings": document.get(group, {}) for group in ("algorithm", "features") if group in groups
    }
    return Params(groups | raw_groups)


def _parse_group(document: Mapping[Any, Any], group: str, name: str) -> object:
    values = document.get(group, {} if group in OPTIONAL else None)
    if not isinstance(values, Mapping):
        problem = "is missing" if group not in document else "must be keys with values"
        raise ParamsRefusedError(
            "{name}: the group {group} {problem}; correct it.",
            code="bad_keys",
            name=name,
            group=group,
            problem=problem,
            keys=(group,),
        )
    try:
        if group == "algorithm":
            return _algorithm(values)
        if group == "features":
            return _features(values)
        settings = MODELS[group].model_validate(dict(values))
        return settings.in_environment() if isinstance(settings, Tracking) else settings
    except ValidationError as error:
        problems = [
            in_words(problem, group) + _suggest_key(group, problem, values) for problem in error.errors()
        ]
        for index, text in enumerate(problems):
            what, _, keys = text.partition("; the keys of ")
            if keys and any(other.endswith(keys) for other in problems[index + 1 :]):
                problems[index] = what  # the keys are listed once
        raise ParamsRefusedError(
            "{name}: {problems}.",
            code="bad_keys",
            name=name,
            problems="; ".join(problems),
            keys=tuple(chain.from_iterable(keys_of(problem, group) for problem in error.errors())),
        ) from None


def _kind(group: str, values: Mapping[Any, Any]) -> "type[Any] | None":
    """The class whose fields are the keys of a group; None for the user's own code."""
    if group in MODELS:
        return MODELS[group]
    from algorithms.features import FEATURES
    from algorithms.methods import CATALOGUE

    name = str(values.get("name"))
    return CATALOGUE.get(name) if group == "algorithm" else FEATURES.get(name)


def _algorithm(values: Mapping[Any, Any]) -> "Algorithm[Any]":
    if not isinstance(values.get("name"), str):
        raise ParamsRefusedError(
            "params.yaml: algorithm.name is missing; give the name of an algorithm.",
            code="bad_keys",
            keys=("algorithm.name",),
        )
    from algorithms.methods import from_settings  # torch, which takes seconds to import

    return from_settings(dict(values))


def _features(values: Mapping[Any, Any]) -> "FeatureLearner | None":
    if values.get("name", "none") == "none" and set(values) <= {"name"}:
        return None
    from algorithms.features import from_settings  # torch, as above

    return from_settings(dict(values))


_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
_NO_GROUP = ("model_type", "model_attributes_type", "dataclass_type", "dict_type", "mapping_type")


def bad_keys(file: str, error: ValidationError, *outer: str) -> ParamsRefusedError:
    """The refusal of a file of settings for the first fault that pydantic found.

    file: its name. outer: keys outside of what was validated.
    """
    problem = error.errors()[0]
    return ParamsRefusedError(
        "{file}: {problem}; correct it.",
        code="bad_keys",
        file=file,
        problem=in_words(problem, *outer).rstrip("."),
        keys=keys_of(problem, *outer),
    )


def keys_of(problem: ErrorDetails, *outer: str) -> tuple[str, ...]:
    """The keys that have to change for what pydantic found wrong. outer: keys outside of what was validated."""
    key = ".".join(str(part) for part in (*outer, *problem["loc"]) if part != "[key]")
    below = problem["ctx"]["keys"] if problem["type"] == CONTRADICTION else ("",)
    return tuple(".".join(filter(None, (key, inner))) for inner in below)


def in_words(problem: ErrorDetails, *outer: str) -> str:
    """What pydantic found wrong, as a clause that names the key. outer: keys outside of what was validated."""
    key = ".".join(str(part) for part in (*outer, *problem["loc"]) if part != "[key]") or "the file"
    if problem["type"] in _UNKNOWN:
        return f"unknown key {key}"
    if problem["type"] in ("missing", "missing_argument"):
        return f"{key} is missing"
    if problem["type"] in ("value_error", "assertion_error"):
        return f"{key}: {problem['msg'].partition(', ')[2]}"
    if problem["type"] == CONTRADICTION:
        return f"{key}: {problem['msg']}"
    should = (
        "should be keys with values"
        if problem["type"] in _NO_GROUP
        else problem["msg"].replace("Input ", "", 1)
    )
    return f"{key} is {problem['input']!r}, but {should}"


def _suggest_key(group: str, problem: ErrorDetails, values: Mapping[Any, Any]) -> str:
    """For an unknown key: the closest valid key of the group, and all valid keys."""
    kind, path = _kind(group, values), problem["loc"]
    if kind is None or problem["type"] not in _UNKNOWN:
        return ""
    schema = TypeAdapter(kind).json_schema()
    groups = [*_groups(schema, schema)]
    for part in path[:-1]:
        inner = [group for each in groups for group in _groups(each["properties"].get(part, {}), schema)]
        groups = inner or groups  # a part may be the kind of a value
    keys = ["name"] if group not in MODELS and len(path) == 1 else []
    keys += dict.fromkeys(key for each in groups for key in each["properties"])
    close = get_close_matches(str(path[-1]), keys, 1, cutoff=0.5)
    where = ".".join(map(str, (group, *path[:-1]))) + ("" if group in MODELS else f" for {values['name']}")
    return f"{f', perhaps {close[0]}' if close else ''}; the keys of {where} are {', '.join(keys)}"


def _groups(schema: Mapping[str, Any], whole: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The objects with properties that a value of this JSON schema may be."""
    if "$ref" in schema:
        yield from _groups(whole["$defs"][schema["$ref"].rpartition("/")[2]], whole)
    for choice in (*schema.get("anyOf", ()), *schema.get("oneOf", ()), *schema.get("allOf", ())):
        yield from _groups(choice, whole)
    if "properties" in schema:
        yield schema

"""What a model's file states beside its parameters; it is read without importing PyTorch."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, JsonValue
from safetensors import SafetensorError, safe_open

from algorithms.errors import ModelRefusedError

FACTS = "epsilonflow"
"""The only key of the file's metadata: everything that is not a parameter, as JSON."""


class CellLayout(BaseModel):
    """The cells of a table's columns: how many each column has, and the weight of each column's cell."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    sizes: tuple[int, ...]
    weights: tuple[float, ...]


class ShrinkageFacts(BaseModel):
    """How far a trained model was shrunk towards the class frequencies, or the centre of a number.

    Attributes:
        gain: How much lower than theirs its losses are, as it was released, in standard deviations of its noise.
        kept: The share of the training that is kept.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False, strict=True)

    gain: float
    kept: float = Field(ge=0, le=1)


class ModelFacts(BaseModel):
    """What a model's file states beside its parameters. Its fields are the keys of the JSON in the file.

    Attributes:
        model: Name of the architecture, or a factory of one's own.
        model_settings: Of the architecture.
        input_shape: Of one record's features.
        classes: Names of the classes, labels or tags, in the order of the scores; empty if they have no names.
        outputs: Scores of a record; as many as there are classes if it is not stated.
        predicts: class, number, labels, next token or tags.
        target: The data card's declaration of another target than classes.
        tokens: Size of the vocabulary, of a model of texts.
        padding: The token that fills up a text.
        cells: Of a table whose rows the model takes as cells.
        front: Kind and settings of the learned features before the model.
        preparation: The data card's declaration of how records become features; older files lack it.
        temperature: What scores are divided by; missing for a model that is not recalibrated.
        shrinkage: Of a model that was shrunk towards the class frequencies or the centre of a number.
    """

    model_config = ConfigDict(
        frozen=True, extra="allow", allow_inf_nan=False, strict=True, protected_namespaces=()
    )

    model: str
    model_settings: dict[str, JsonValue] | None = None
    input_shape: tuple[int, ...]
    classes: tuple[str, ...]
    outputs: int | None = None
    predicts: str | None = None
    target: dict[str, JsonValue] | None = None
    tokens: int | None = None
    padding: int = 0
    cells: CellLayout | None = None
    front: dict[str, JsonValue] | None = None
    preparation: dict[str, JsonValue] | None = None
    temperature: float | None = Field(default=None, gt=0)
    shrinkage: ShrinkageFacts | None = None

    @property
    def output_count(self) -> int:
        """How many scores a record has, or each of its parts."""
        return self.outputs or len(self.classes)

    @property
    def level(self) -> float:
        """The level of the quantile to predict, from 0 to 1; that of the median for other targets."""
        level = (self.target or {}).get("quantile")
        return level if isinstance(level, float) else 0.5

    def document(self) -> dict[str, JsonValue]:
        """What was stated, as in the file."""
        return self.model_dump(mode="json", exclude_unset=True)


def facts_of(path: Path) -> ModelFacts:
    """The facts in a model's file; raises ModelRefusedError for a file that epsilonflow did not write."""
    try:
        with safe_open(path, framework="np") as file:
            return ModelFacts.model_validate_json((file.metadata() or {})[FACTS])
    except (OSError, SafetensorError, KeyError, ValueError):
        raise ModelRefusedError(
            f"{path} is not a model that epsilonflow trained; give the model.safetensors of a run."
            if path.exists()
            else f"there is no model at {path}; give the model.safetensors of a run, or the folder that contains it."
        ) from None

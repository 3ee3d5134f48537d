"""A trained model as a model of transformers, for folders that `export --to huggingface` writes."""

from collections.abc import Collection
from typing import Any

from torch import Tensor

from algorithms.model_facts import ModelFacts
from algorithms.models import for_evaluation
from algorithms.models.libraries import imported_library
from algorithms.models.saved import architecture

_transformers: Any = imported_library("transformers")
_outputs: Any = imported_library("transformers.modeling_outputs")


class EpsilonflowConfig(_transformers.PretrainedConfig):  # type: ignore[misc] # an extra
    """Holds the facts in the model's file, as JSON; see `algorithms.models.saved`."""

    model_type = "epsilonflow"

    def __init__(self, facts: str = "{}", **others: Any) -> None:
        self.facts = facts
        super().__init__(**others)


class EpsilonflowModel(_transformers.PreTrainedModel):  # type: ignore[misc]
    """Maps prepared records [batch, *input_shape] to logits [batch, classes].

    allow_code: as in `algorithms.load`; an argument of `from_pretrained`.
    """

    config_class = EpsilonflowConfig
    main_input_name = "records"
    _tied_weights_keys: Any = None

    def __init__(self, config: EpsilonflowConfig, allow_code: Collection[str] = ()) -> None:
        super().__init__(config)
        model = for_evaluation(
            architecture(ModelFacts.model_validate_json(config.facts), allow_code=allow_code)
        )
        self.network = model.module
        self._scores = model.scores
        self.post_init()

    @classmethod
    def from_pretrained(cls, *arguments: Any, **options: Any) -> Any:
        """The model of a folder; buffers that are in no file, which transformers leaves unset, are made again."""
        loaded = super().from_pretrained(*arguments, **options)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        in_file = model.state_dict()
        for name, buffer in cls(model.config, options.get("allow_code", ())).named_buffers():
            if name not in in_file:
                model.get_buffer(name).copy_(buffer)
        return loaded

    def _init_weights(self, module: Any) -> None:
        """Do nothing, since every weight is in the file."""

    def forward(self, records: Tensor, **_others: Any) -> Any:
        """Return the scores as `logits`."""
        return _outputs.SequenceClassifierOutput(logits=self._scores(self.network(records)))

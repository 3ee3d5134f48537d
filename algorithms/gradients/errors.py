"""What the package raises by itself; each message is a sentence that names the model or its layer."""


class UnsupportedModelError(ValueError):
    """A model whose per-example gradients cannot be computed: its passes fail, or have no gradient of their own.

    Attributes:
        code: Of a reason that callers may word by the names of their own settings; empty for others.
        fields: The values in the message, where there is a code.
    """

    def __init__(self, message: str, /, *, code: str = "", **fields: object) -> None:
        super().__init__(message)
        self.code, self.fields = code, fields


class RecordsNotIndependentError(ValueError):
    """A model that mixes records, so that no record's gradient can be bounded; the message names the layer.

    Attributes:
        kind: "batch_norm" where PyTorch's batch normalisation mixes them; empty for other reasons.
    """

    def __init__(self, message: str, /, *, kind: str = "") -> None:
        super().__init__(message)
        self.kind = kind


class ProcessLostError(RuntimeError):
    """Another of the processes that share a sum or parameters has ended."""

    def __init__(
        self, message: str = "another process of this run has ended; start all of them again."
    ) -> None:
        super().__init__(message)

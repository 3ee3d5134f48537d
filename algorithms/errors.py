"""What the privacy layer refuses, one sentence each, before anything is spent; and what fails after it."""


class RefusedError(ValueError):
    """A request that cannot be honoured; the message says what was asked, what is allowed and what to do."""


class BudgetRefusedError(RefusedError):
    """The budget of a run or of a population does not cover the request."""


class LedgerBrokenError(RefusedError):
    """The ledger's hash chain does not hold: a row was changed, removed or inserted outside the ledger."""


class ModelRefusedError(RefusedError):
    """A model that does not fit the data or that cannot be trained privately; the message says what to do."""


class EncoderRefusedError(ValueError):
    """An encoder that cannot be had, or not for these records; the message says what to do."""


class QueryFailedError(RuntimeError):
    """An answer that could not be computed after its charge; the message holds nothing of the records."""

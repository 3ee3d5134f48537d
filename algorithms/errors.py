"""Errors of the privacy layer: refusals, raised before anything is spent, and failures after a charge."""


class RefusedError(ValueError):
    """A request that cannot be honoured; the message says what was asked, what is allowed and what to do."""


class BudgetRefusedError(RefusedError):
    """The budget of a run or of a population does not cover the request."""


class NoiseElsewhereError(RefusedError):
    """A run that another home has reserved, which has the key of its noise."""


class LedgerBrokenError(RefusedError):
    """The ledger's hash chain does not hold: a row was changed, removed or inserted outside the ledger."""


class ModelRefusedError(RefusedError):
    """A model or encoder that is not available, does not fit the data or cannot be trained privately."""


class QueryFailedError(RuntimeError):
    """A query that failed after it was charged; the message contains nothing about the records."""

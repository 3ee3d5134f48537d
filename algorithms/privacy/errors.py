"""What the privacy layer refuses, one sentence each, before anything is spent; and what fails after it."""


class Refused(ValueError):
    """A request that cannot be honoured; the message says what was asked, what is allowed and what to do."""


class BudgetRefused(Refused):
    """The budget of a run or of a population does not cover the request."""


class LedgerBroken(Refused):
    """The ledger's hash chain does not hold: a row was changed, removed or inserted outside the ledger."""


class Failed(RuntimeError):
    """An answer that could not be computed after its charge; the message holds nothing of the records."""

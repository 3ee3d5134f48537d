"""The refusals of the data package: one sentence each, without any value of a record."""


class DataRefusedError(ValueError):
    """A data set that cannot be used; the message says what was found, what is allowed and what to do."""

"""The budget's owner's view: one HTML page of all populations and blocks over time, for `epsilonflow ledger report`."""

"""The owner's view of the budget: an HTML page of all populations and blocks (`epsilonflow ledger report`)."""

"""The owner's view of the budget: an HTML page of all populations and blocks over time (`epsilonflow ledger
report`).
"""

"""Audits: lower bounds on the privacy loss of what really runs, against what it claims.

`bounds` has the statistics, `mechanisms` tests each kind of noise alone, `game` plays the attacker against a registered
method at the barrier, on made-up records. It stands on the methods and is imported by none of them.
"""

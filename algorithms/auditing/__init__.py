"""Audits: lower bounds on the privacy loss of what really runs, against what it claims.

`bounds` has what attacks prove, `game` plays the attacker against a registered method at the barrier, on made-up
records, `audit` puts both together, and tests each kind of noise alone. Nothing below imports them.
"""

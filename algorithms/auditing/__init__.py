"""Audits: lower bounds on the privacy loss of what really runs, against what it claims.

`bounds` has what attacks prove, `game` plays the attacker against a registered method at the barrier, on made-up
records, `likelihood` scores what it saw, `checks` compares the parts of the claim with what was played, `audit` puts
all together. `mechanism_audit` tests each kind of noise alone, `private_evaluation` the histogram of held-out records.
Nothing below imports them.
"""

"""Events and what they cost: by PLD, by Rényi divergences, purely; filters; calibration of noise; risk.

`epsilon.epsilon` is the cost of a schedule of events; `event_rules` has each event's theorem.

Knows no records and no noise. Imports nothing else of ours but errors.
"""

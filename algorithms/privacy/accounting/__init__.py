"""Events and what they cost: by PLD, by Rényi divergences, purely; filters; calibration of noise; risk.

Knows no records and no noise. Imports nothing else of ours but errors.
"""

"""The steps of the pipeline: one plain function and one file per step, run as `python -P -m tasks.STEP`."""

from epsilonflow import find_shadowing

if (_shadowing := find_shadowing("algorithms", "data")) is not None:
    raise ImportError(_shadowing)

"""The steps of the pipeline: one plain function and one file per step, run as `python -m tasks.STEP`."""

"""The steps of the pipeline: one plain function a step, one file a step, run as `python -m tasks.STEP`."""

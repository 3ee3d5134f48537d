"""The configuration of a run: params.yaml as strict models, overrides and recipes, and the environment."""

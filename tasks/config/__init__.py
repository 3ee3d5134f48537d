"""What a run is asked to be: params.yaml as strict models, overrides and recipes, and the environment."""

"""Runs: their identity, folder, provenance and result, the population that they are charged to, and their stages."""

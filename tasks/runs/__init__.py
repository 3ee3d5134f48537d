"""What a run is: its identity, folder, provenance and result, the population that it is charged to, and its stages."""

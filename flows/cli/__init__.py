"""The command `epsilonflow`. It imports the flows; no flow imports it."""

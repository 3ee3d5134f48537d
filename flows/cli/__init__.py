"""The command `epsilonflow`. It imports the flows and is imported by none of them."""

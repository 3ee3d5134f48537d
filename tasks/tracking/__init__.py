"""Everything that is sent to Weights & Biases."""

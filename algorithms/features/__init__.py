"""Features that are learned from all records before training."""

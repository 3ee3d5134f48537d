"""What is sent to Weights & Biases, and nothing else is."""

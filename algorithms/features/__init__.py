"""What is learned about the features of all records before training."""

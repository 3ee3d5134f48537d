"""What is run by hand and nightly (`make soak`), not with every change: kills, schedulers, a year of retrainings."""

"""Scheduled retraining on blocks of data that arrive over time."""

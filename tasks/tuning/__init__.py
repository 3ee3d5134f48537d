"""Searches for settings, paid for as a whole."""

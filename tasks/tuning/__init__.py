"""Searches for settings that are paid for as a whole."""

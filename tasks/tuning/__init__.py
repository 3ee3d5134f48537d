"""Searches for settings that are paid for as a whole: their settings, their plan, and the searches themselves."""

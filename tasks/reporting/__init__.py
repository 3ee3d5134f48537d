"""The report of a run as one HTML page: its words, figures and templates."""

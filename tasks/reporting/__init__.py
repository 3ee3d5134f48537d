"""The report of a run as one HTML page: its texts, figures and templates."""

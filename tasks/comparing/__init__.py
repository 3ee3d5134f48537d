"""Comparisons: many runs on public records, their results, figures and page."""

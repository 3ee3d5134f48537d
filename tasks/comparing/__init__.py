"""Comparisons of methods on public records: their definition, their trials, and the tables and figures of these."""

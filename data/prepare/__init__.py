"""From the files of a data card to arrays that training maps into memory: fetched, checked, read, split,
transformed.
"""

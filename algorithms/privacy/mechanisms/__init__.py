"""What a release is: sampling, bound and noise as values, the event that they cost, and the draws.

May import accounting.
"""

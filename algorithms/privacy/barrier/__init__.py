"""The private records and the answers about them: the only code that reads records during training.

May import mechanisms, accounting, gradients and models.
"""

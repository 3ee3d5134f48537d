"""What a method is, how its noise is calibrated, and the training loop; independent of data sets and services.

May import privacy, features and models; is imported by methods.
"""

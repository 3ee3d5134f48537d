"""What a method is, how its noise is calibrated, and the loop that trains: no data set, file or service is known here.

May import privacy, features and models; is imported by methods.
"""

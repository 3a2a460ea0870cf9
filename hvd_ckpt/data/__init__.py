"""What the library knows of training data: batches, objectives, the protocol of data sets, the order of samples.

objectives   batches, and losses that know how many terms they are a mean of
dataset      the protocol of data sets, random numbers by sample, splits
sampler      the order of samples, whose position is one integer, and loaders
"""

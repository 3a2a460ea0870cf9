"""Wrappers for the objects of a training script: the optimizer and the gradient scaler.

optimizer   DistributedOptimizer, which puts reduction, sharding and replicas together
precision   automatic mixed precision, with overflows that every rank sees
replicas    logical replicas: the same bits on any number of ranks
"""

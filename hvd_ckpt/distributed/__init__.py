"""Wrappers for the objects of a training script: the optimizer and the gradient scaler.

optimizer   DistributedOptimizer, which puts reduction, sharding and replicas together
options     its arguments, checked together
shard       its argument ``shard``
precision   automatic mixed precision, with overflows that every rank sees
extension   shards and replicas: checks, and what they add to it
verification  ``verify``: comparisons of weights
replicas    logical replicas: the same bits on any number of ranks
"""

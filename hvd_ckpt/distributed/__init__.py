"""Wrappers for the objects of a training script: the optimizer and the gradient scaler.

    optimizer         DistributedOptimizer, which puts reduction, sharding and replicas together
    options           its arguments, checked together
    shard             its argument ``shard``
    extension         shards and replicas: checks, and what they add to it
    clipping          clipping by the norm of all gradients, sharded or not
    averaging         running averages of the weights, sharded or not
    precision         automatic mixed precision, with overflows that every rank sees
    verification      ``verify``: comparisons of weights

Logical replicas, which give the same bits on any number of ranks:

    replicas          their samples, random state and buffers
    replica_reducers  their gradients, whole or in shards
    tree              sums in one fixed order
"""

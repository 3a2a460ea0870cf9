"""Gradient reduction: each gradient is allreduced once, in a fixed order.

The way of a gradient:

    machine       the protocol of a step at all stages, hooks, and the optimizer that owns a parameter
    accumulation  counts of how often each gradient arrives
    assignment    the order of parameters, and which of them share a bucket
    buckets       the flat tensors that gradients lie in
    reducer       when each bucket leaves
    communicator  the reduction of a bucket

What is not usual:

    flags         what ranks tell each other: control flags, and reports
    further       further rounds: late gradients, and those that no bucket had
    gradients     what stands in ``p.grad`` before a synchronization, and changes by hand
    adasum        updates in place of gradients (op=Adasum)

The optimizer:

    construction  checks before it is made
    wrapping      makes it from the wrapped one
    optimizer     its methods
    phases        what its calls allow
    state, stats  its state, and counts of what has left
    weights       a comparison of weights in each step
    stepping      options of groups and limits of clipping, which are compared with them
    consistency   a comparison of all weights, on request

Collectives outside of a step:

    broadcast     parameters, optimizer state and objects
    leveling      equal orders and names after ranks have loaded separately
"""

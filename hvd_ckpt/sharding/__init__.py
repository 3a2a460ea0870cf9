"""ZeRO over Horovod: optimizer state, gradients and parameters split over the ranks.

Rajbhandari, Rasley, Ruwase, He, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020).

All stages:

    construction     checks of arguments, and equal weights at the start
    layout           which rank has which elements of which parameter
    optimizer        the methods of the optimizer, which updates shards
    sharding         the parts of an optimizer, as one object, and whether the user or the wrapped class finds them
    surface          what a user finds in its state, and runs around its step
    state            the optimizer's state in parts

Gradients (stages 2 and 3):

    reducer          reduce-scatters groups during the backward pass
    schedule         when each group leaves
    in_flight        flat buffers of gradients on their way, and the sums that arrive
    gradients        placeholders in ``p.grad``

Weights:

    flat             whole parameters, gathered after each step (stages 1 and 2)
    parameters       parameters that are whole only while their unit runs (stage 3)
    units            which parameters are gathered together
    module_hooks     hooks around a module's passes
    passes           when units are gathered, also ahead, and freed
    unshard          the memory and states of a unit's parameters
    divergence       ranks that run different units
"""

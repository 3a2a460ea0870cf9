"""The main job: does training give the right weights, whichever engine reduces the gradients and whichever way
activations are recomputed, and at what price in time and memory?

Every *engine* (this library, stock Horovod, PyTorch's DDP, Apex's) trains every *workload* (a real model on real data, or a
small *scenario* with one difficulty) in every *cell* (a way to recompute), and each result is compared with a reference computed in
one process.

    cells        the cells: variants of recomputation and numbers of segments; the models that recompute as a cell says
    workloads    the base of all workloads, and real models: model, batches, loss, and the passes of a step
    scenarios    small models that are hard
    recording    which gradients are reduced, how often, and in which order
    training     one training run: precision, seeds, steps, fingerprints
    reference    the right answer, from one process
    worker       a rank of an engine's job: trains the cells, writes events
    launch       starts jobs, watches them, ends those that hang
    verdict      from the figures of each training to a judgement of each cell
    comparison   one comparison from options to report
    report       tables, pages and the picture
    command      ``hvd-ckpt compare``

All engines of data parallelism are those of :mod:`.runner.engines`.
"""

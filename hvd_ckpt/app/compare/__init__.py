"""The main job: does training give the right weights, whichever engine reduces the gradients and whichever way
activations are recomputed, and at what price in time and memory?

Every *engine* (this library, stock Horovod, PyTorch's DDP, Apex's) trains every *workload* (a real model on real data, or a
small *scenario* with one difficulty) in every *cell* (a way to recompute), and each result is compared with a reference computed in
one process.

    cells        the cells: variants of recomputation and numbers of segments; the models that recompute as a cell says
    workloads    real models: model, batches, loss, and the passes of a step
    scenarios    small models that are hard; ``stages`` has those that are trained in pipeline stages, ``parts`` in parts of layers,
                 with their engines; ``catalog`` lists all
    stage_engines  the engines of those in stages, where the harness has no such; all other engines are those of the harness
    recording    which gradients are reduced, how often, and in which order
    training     one training run: precision, seeds, steps, fingerprints
    reference    the right answer, from one process
    worker       a rank of an engine's job: trains the cells, writes events
    launch       starts jobs, watches them, ends those that hang
    comparison   one comparison from settings to report
    verdict      from events to a judgement of each cell
    report       tables and pages; ``pictures`` draws them
    command      ``hvd-ckpt compare``
"""

"""The main job: does training give the right weights, whichever engine reduces the gradients and whichever way
activations are recomputed, and at what price in time and memory?

Every *engine* (this library, stock Horovod, PyTorch's DDP, Apex's) trains every *workload* (a real model on real data, or a
small *scenario* with one difficulty) in every *cell* (a way to recompute), and each result is held against a reference computed in
one process. One page per step:

    cells        what is compared: variants of recomputation and numbers of segments
    data         the digits and the text
    workloads    model, batches, loss, and what happens in a step
    scenarios    the small ones that are hard
    catalog      all of them by name
    recomputing  how a model's forward pass recomputes in a cell
    engines      how a rank joins the others, wraps model and optimizer, and recomputes
    planned      how it gets a plan in a cell that leaves what is recomputed to one
    mixed        what a step does in each precision
    recording    which gradients are reduced, how often, and in which order
    training     one training run: seeds, steps, fingerprints
    reference    the right answer, from one process
    worker       a rank of an engine's job: trains the cells, writes events
    nursery      where ranks come from: processes that fork
    events       the JSON lines between ranks and launcher
    job          what the launcher tells the ranks
    launch       starts jobs, watches them, ends those that hang
    comparison   one comparison from settings to report
    verdict      from events to a judgement of each cell
    tables       who is right where, what it costs, and every cell
    plots        the same as pictures
    report       results.json and report.md
    command      ``hvd-ckpt compare``
"""

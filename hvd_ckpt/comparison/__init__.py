"""The main job: does training give the right weights, whichever engine reduces the gradients and whichever way
activations are recomputed, and at what price in time and memory?

Every *engine* (this library, stock Horovod, PyTorch's DDP) trains every *workload* (a real model on real data) in every
*cell* (a way to recompute), and each result is held against a reference computed in one process. One page per step:

    cells       what is compared: variants of recomputation and numbers of segments
    data        the digits and the text
    workloads   model, batches and loss
    engines     how a rank joins the others, wraps model and optimizer, and recomputes
    training    one training run: seeds, steps, fingerprints
    reference   the right answer, from one process
    worker      a rank of an engine's job: trains the cells, writes events
    events      the JSON lines between ranks and launcher
    launch      starts jobs, watches them, ends those that hang
    verdict     from events to a judgement of each cell
    report      the table, results.json and report.md
    command     ``hvd-ckpt compare``
"""

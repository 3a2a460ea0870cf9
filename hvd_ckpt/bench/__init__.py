"""How fast gradients meet: the step time of this library beside stock Horovod's and DDP's.

The comparison (:mod:`hvd_ckpt.bench.compare`) asks whether training is right; this room asks only for time, and for the bytes
held for gradients. One page per step:

    workloads   many small gradients, few large ones
    job         what the launcher tells the ranks, what they answer (on rank_job, which jobs of other rooms share)
    worker      one rank: warm-up, timed steps, one look at memory
    launch      starts a job and waits for it
    reduce      the plan (whole jobs in alternating order) and the statistics
    report      the table, results.json and report.md
    command     ``hvd-ckpt bench reduce``

What recomputing costs and saves is measured in rooms of their own: :mod:`hvd_ckpt.bench.recompute` (plans beside every
peer) and :mod:`hvd_ckpt.bench.densenet` (a DenseNet over ranks and batch sizes). :mod:`hvd_ckpt.bench.train` measures
what the training loop adds to a step.
"""

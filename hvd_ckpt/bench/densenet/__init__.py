"""The table of the pytorch-checkpoint project (csrhddlam), anew: what recomputing a DenseNet costs and saves where ranks train it.

There, two workers at batch 256 took 5.25 GB and 0.27 s a step with everything kept, 2.98 GB and 1.41 s with PyTorch's
checkpoint, and 2.97 GB and 0.31 s with that project's. Here a step is the whole step of a training script with this library's
``DistributedOptimizer``, whoever recomputes, so that nothing but recomputation differs.

contenders  keep everything, PyTorch's checkpoint, this library's plans and efficient DenseNet
steps       one contender's model and optimizer, and the steps that it takes
job         what the launcher tells the ranks, what they answer
worker      one rank: everyone warms up, shows its peak, and trains against the clock in turn
launch      starts a job and waits for it
case        the answers of all ranks as ratios and verdicts
report      the table, results.json and report.md
picture     memory and time over batch sizes
command     ``hvd-ckpt bench densenet``
"""

"""Time training steps with this library, stock Horovod and DDP, in whole jobs that alternate.

Gradients are many and small (a DenseNet) or few and large (a transformer). Plain SGD is the optimizer whose own work hides
least of the reduction. Run it on a machine that does nothing else.
"""

from benchmarks.suite import Suite

ENGINES = ("hvd_ckpt", "horovod", "ddp")

reduce = Suite(
    engines=ENGINES,
    workloads=("densenet-narrow", "transformer"),
    columns=("beyond",),
    against={f"of {name}": name for name in ENGINES},
    controllers="gloo,mpi",
    rounds=5,
    steps=15,
    warm_up=3,
    quick={"np": "2", "controller": "gloo", "rounds": 1, "steps": 2},
    quick_sizes={"densenet-narrow": {"layers": 4}, "transformer": {"width": 64, "layers": 2}},
    notes=(
        "densenet-narrow: 371 gradients of 4.2 MiB in all; transformer: 98 of 96 MiB.",
        "gradients MiB: bytes that are held after a step beyond parameters and buffers: gradients and the engine's buckets.",
        "Every rank of every engine has the same number of threads, and is started by horovodrun in the same way; stock Horovod "
        "and DDP run with their defaults, this library with those of its init(). DDP's collectives are Gloo's under either "
        "controller, and NCCL's on GPUs.",
    ),
)

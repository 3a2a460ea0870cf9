"""Memory and time of recomputation: this library's plans beside no recomputation and everything else that recomputes.

methods  no recomputation, what PyTorch and others offer, and a DenseNet checkpointed in its layers
measure  exact peaks, seconds, and whether the result is right
case     one workload from start to end, with this library's plans; the job that does so on several ranks
report   tables and the picture
command  ``python -m benchmarks recompute``
"""

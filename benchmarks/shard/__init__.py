"""Memory and time of sharding: every stage of this library beside the same stage of PyTorch and DeepSpeed, on one GPT-lite.

job      the configurations, the settings, and what a rank finds
engines  a configuration under training: this library's, PyTorch's and DeepSpeed's
worker   one rank of a job: memory of each configuration by itself, then time of all in turn
results  the results of all ranks, the tables and the picture
wire     wire formats: losses, errors, bytes
command  ``python -m benchmarks shard``
"""

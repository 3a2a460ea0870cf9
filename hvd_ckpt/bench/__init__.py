"""Benchmarks: commands that measure this library beside others, and the comparison of training results.

harness     jobs of ranks, statistics, reports, command options and workloads of all benchmarks
compare     the main job: does training give the right weights, and at what price in time and memory?
reduce      speed of gradient reduction beside stock Horovod and DDP
recompute   plans beside other ways to recompute
local       local SGD and DiLoCo beside synchronous training
pipeline    pipeline stages beside torch.distributed.pipelining
shard       memory and time of sharding
tensor      layers in parts beside PyTorch's parallelize_module
faults      runs that are killed, resumed and checked (the runs are in tests/faults)
replicas    hashes of runs on several numbers of ranks (the runs are in tests/same_bits)
train       overhead of the training loop
command     ``hvd-ckpt bench``: the group of commands
"""

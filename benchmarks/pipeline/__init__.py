"""Pipeline stages: step time, memory and messages beside ``torch.distributed.pipelining``, and one rank without stages.

job       what the ranks measure
command   ``python -m benchmarks pipeline``: jobs in turn, the table, and the timeline of a step
"""

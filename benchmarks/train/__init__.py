"""Overhead of the training loop: ``Trainer.run`` beside a loop written by hand with the same calls, in the same processes.

command  ``python -m benchmarks train``, its jobs and its table
loops    both loops, in rounds that alternate, and one rank of a job
"""

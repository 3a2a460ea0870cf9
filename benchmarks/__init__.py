"""Measurements of speed and memory, beside other engines: ``python -m benchmarks SUITE --help``, in a clone of the repository.

scale             steps on up to 16,384 ranks, predicted from sizes
scale_on_hosts    such predictions, beside steps on hosts with slow links
"""

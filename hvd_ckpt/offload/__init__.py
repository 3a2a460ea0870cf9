"""Shards outside of the memory of the device.

shards        state, weights and gradients of a rank's shards
host_memory   the memory for them: mapped files, or pinned host memory
"""

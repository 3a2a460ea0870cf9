"""ZeRO over Horovod: optimizer state, gradients and parameters split over the ranks.

Rajbhandari, Rasley, Ruwase, He, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020).
"""

"""Local SGD: ranks step on their own gradients, and average their parameters at intervals.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data" (2017); Lin et al., "Don't Use Large
Mini-Batches, Use Local SGD" (2018); Douillard et al., "DiLoCo" (2023) and "Streaming DiLoCo" (2025).
"""

"""Local SGD: ranks step on their own gradients, and average their parameters at intervals.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data" (2017); Lin et al., "Don't Use Large
Mini-Batches, Use Local SGD" (2018); Douillard et al., "DiLoCo" (2023) and "Streaming DiLoCo" (2025).

optimizer, construction   ``LocalSGD``
schedule   the steps after which averages leave and are applied
averaging  the averages of one optimizer
runs, weights   flat tensors that are averaged; their anchor and outer optimizer
exchange   the collectives of an average
"""

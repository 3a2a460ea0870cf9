"""Tensor parallelism (Shoeybi et al., "Megatron-LM", 2019): the layers of a model split over several processes, its parts.

functions     Megatron's two autograd functions, and the gathering of scores
random_state  random numbers of a split layer that are those of the whole one
head          cross entropy over a vocabulary that is split
layers        column, row and vocabulary parallel layers, and split attention
copies        verification of what every part has whole
recipes       which layers of a model are split how
"""

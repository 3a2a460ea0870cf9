"""Tensor parallelism (Shoeybi et al., "Megatron-LM", 2019): the layers of a model split over several processes, its parts.

functions     Megatron's two autograd functions, and the gathering of logits
region        what runs between split layers, and the whole tensors that enter there
random_state  random numbers of a split layer, equal to those of the whole layer
layers        column, row and vocabulary parallel layers, cross entropy over a split vocabulary, and split attention
verification  comparison of the split model with the whole one, in its first call
twins         copies of both that compute a pass, and the differences of these
copies        verification of copies: parameters that are whole on every part
recipes       splitting of a model's layers, and recipes for known models
"""

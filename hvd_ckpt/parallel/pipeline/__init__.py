"""Micro-batches: one after the other on one rank, or in stages on several ranks that work at the same time.

microbatch    one after the other
pipeline      ``Pipeline``, a chain in stages
chain, skip   blocks with arguments in common, and skip connections across blocks
schedule      the order of forward and backward passes on each stage
execution     a step on one rank
transport     messages between stages
tied          parameters of blocks on several stages
balance       cuts into parts of equal cost
stages        plans of cuts and policies together
random_state  random numbers of a micro-batch and a block
"""

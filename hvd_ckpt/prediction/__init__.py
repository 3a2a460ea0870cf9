"""Prediction of the memory of a training step, of what it sends, and of its time.

memory, memory_estimate, measured_memory   estimates of memory, their result, and what they measure
network          the time of each collective on a stated network
links            the network of the running job, measured
computation      the computation of a model for any budget, measured or counted
step_time        the time of a step, for each way to train
layouts, training_layout   the layouts that fit a memory, and one of them
"""

"""``hvd-ckpt bench scale``: what communication costs on more ranks than there are here.

trace      the collectives and messages of a training step in their order, with the computation between them
record     the trace of a step that runs here, on few ranks
sizes      the trace that follows from a model's sizes alone: of this library, and of the baselines
network    the time of each collective on a stated network
replay     a trace on that network, for any number of ranks
command    settings, tables and picture
"""

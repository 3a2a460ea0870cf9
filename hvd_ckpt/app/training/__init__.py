"""A thin training loop: data, optimizers, progress, snapshots, and the command that joins them.

config, field_types, combinations   settings: their types, and which go together
prepare        model and optimizer of one rank, and where a run starts
build, own     data and models, also of the user's own modules
model          device, precision and recomputation of the model
optim          optimizers and learning rates
plans          the plan of a run
modes, local   how ranks share the work of a step
trainer        the steps of a start, and the loop
evaluation     evaluation on other samples
report, logs, summary, callbacks, profiling   what a run shows
resume         what a run takes from a snapshot
ending         errors on all ranks, and the exit
elastic        runs that go on after changes of the ranks
trained        the model of a finished run
"""

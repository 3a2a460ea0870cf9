"""A thin training loop: data, optimizers, progress, snapshots, and the command that joins them.

config, field_types                 settings, which of them go together, and their types
build, functions                    data and models, also by functions of the user
model          device and recomputation of the model
optim          optimizers and learning rates
plans          the plan of a run
modes          how ranks share the work of a step
trainer        the steps of a start, and the loop
evaluation     evaluation on other samples
report, logs, summary, callbacks              what a run shows
resume         what a run takes from a snapshot
ending         errors on all ranks, and the exit
elastic        runs that go on after changes of the ranks
trained        the model of a finished run
"""

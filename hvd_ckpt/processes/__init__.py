"""The processes of a job: how they start, find each other, are watched and end.

launchers     how a job was started: horovodrun, mpirun, Slurm, alone
ancestry      the processes between a rank and its launcher, and the other ranks below that
mpi           the communicator of mpi4py, and what Open MPI needs to be told
hosts         where the other ranks run, and whether their machines answer
rendezvous    the first exchange, before Horovod runs
grid          stages, replicas and parts: the place of each rank, and its host
links         messages between all processes of a grid, and how it is formed
near          messages between processes of one host
device_link   messages of tensors on GPUs, between stages and between parts
parts         sums and gathers among the parts of a replica
partition     activations that are kept in shares, one on each part
whole_model   what the core asks of a model that is spread over processes
runtime       init, shutdown and what Horovod needs set before it starts
devices       the device of each process
commands      commands that end with everything that they have started
stopping      requests to stop: signals, and a file in the folder of a run
watchdog      waits for ranks that have ended or are stopped, and who these are
uncaught      what an uncaught error prints: a traceback for each host, one line for each other rank
probe         what a set-up can do, tried in a process of its own
"""

"""Snapshots: what a run needs to resume, on disk.

snapshots, arguments   ``Snapshots``, which a loop uses
content        what a rank saves, and how rank 0 completes it
writer, barrier, folder   the thread that writes, its barrier, the folder
schema, tensors   manifest and files
state          state besides weights, and whether it fits
random_state, order, local, slices   kinds of state: random numbers, numbers of parameters, local SGD, tensor parallelism
reader, files  reading, with size and hash of each file
resume, loading   from saved shards to those of this job
export         whole weights in one file
stopping       requests to stop
lock           one run at a time in a folder
"""

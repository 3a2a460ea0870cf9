"""Snapshots: what a run needs to resume, on disk.

snapshots, arguments   ``Snapshots``, which a loop uses
training_state model, optimizer, loss scale and averages: saving and loading
model          the tensors of a model and optimizer, and which elements a rank saves or wants
ranges         elements of a tensor
content        what a rank saves, and how rank 0 completes it
writer, barrier           the thread that writes, and its barrier
folder         names of snapshots, renames and removal
schema, tensors   manifest and files
state, random_state, period   plain values; random numbers; weights that ranks have of their own
reader         reading of ranges, with size and hash of each file
fits, loading  whether a snapshot fits, and loading of its tensors
export         whole weights in one file
convert        snapshots of the earlier version
stopping       requests to stop
lock           one run at a time in a folder
"""

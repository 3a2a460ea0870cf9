"""Snapshots: what a run needs to resume, on disk.

snapshots, arguments   ``Snapshots``, which a loop uses
training_state model, optimizer, loss scale and averages: saving and loading
model          the tensors of a model and optimizer, and which elements of them a process has
schema         manifest, tensors and ranges
state, random_state       plain values
content        what a rank saves, and how rank 0 completes it
writer, barrier           the thread that writes, and its barrier
folder         names of snapshots, renames and removal
tensors        values in files, and copies of tensors
reader         reading of ranges, with size and hash of each file
fits           whether a snapshot fits model and optimizer
export         whole weights in one file
convert        snapshots of the earlier version
lock           one run at a time in a folder
"""

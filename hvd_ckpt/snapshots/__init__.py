"""Snapshots: what a run needs to resume, on disk.

snapshots      ``Snapshots``, which a loop uses
training_state what a loop trains, and random state: checks, saving and loading
model          the tensors of a model and optimizer, and which elements of them a process has
schema         manifest, tensors and ranges
content        what a rank saves and writes, and how rank 0 completes it
writer         the thread that writes
folder         names of snapshots, renames and removal
tensors        values in files, and copies of tensors
reader         reading of ranges, with size and hash of each file
fits           schemas of plain values, and whether a snapshot fits model and optimizer
export         whole weights in one file
convert        snapshots of earlier versions
lock           one run at a time in a folder
"""

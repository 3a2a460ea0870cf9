"""Faults: training that is killed, snapshots whose writing is killed, long runs that may leak, training that waits for snapshots.

job       ``hvd-ckpt train`` under a launcher, observed from outside
checks    whether snapshots can be read, and whether two runs ended in the same bits
kill      the kill test: which signal goes where and when, and disturbed runs compared with an undisturbed one
save      the save test: a process that is killed while it saves
soak      memory, descriptors and threads of a long run
stall     how long training waits for a snapshot
command   ``hvd-ckpt bench faults``, and the results of several calls in one file
"""

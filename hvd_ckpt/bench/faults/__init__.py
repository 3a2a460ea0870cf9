"""What is lost when things go wrong: training that is killed, snapshots whose writing is killed, long runs that may leak.

drawing    a seed to a disturbed run: how many ranks, and who gets which signal when
processes  the processes of a job, found in /proc by a mark in their environment
job        ``hvd-ckpt train`` under a launcher, watched
judging    what the snapshots of a run are worth, and whether two runs came to the same
kill       the kill test: disturbed runs beside one that nobody disturbs
saver      the process that saves in a loop and is killed; and what it has left
save       the save test
fit        a line through samples that lie on plateaus
soak       memory, descriptors and threads of a long run
stall      how long training stands still for a snapshot
records    results of several calls, added up
report     the tables, report.json and report.md
command    ``hvd-ckpt bench faults``
"""

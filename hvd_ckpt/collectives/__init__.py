"""Messages between ranks, and what they agree on.

agreement      options, errors and objects that ranks compare
asynchronous   asynchronous collectives of a process set, with names
exchange       reduce-scatter and all-gather of rows
rows           messages of one row for each rank, also in two levels
formats        the number formats in which ranks send values
process_sets   groups of ranks, such as those of each host
scatter        ``reducescatter`` of Horovod
"""

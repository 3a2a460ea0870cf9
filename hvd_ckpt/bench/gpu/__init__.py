"""``hvd-ckpt doctor --gpu``: one command that checks everything that runs on a GPU, in a bounded time.

``command`` has the list of checks, the runner and the report; ``machine`` looks at the machine and at the builds of Horovod;
``checks`` and ``ranks`` have the checks, small functions that ``worker`` calls on each rank; ``training`` has what they share.
"""

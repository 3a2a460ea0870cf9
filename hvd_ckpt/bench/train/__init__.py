"""What the training toolkit costs: ``Trainer.run`` beside a loop written by hand with the same calls, in the same processes.

loops    both loops, in rounds that alternate
job      what the launcher tells the ranks, what they answer; starts a job
worker   one rank of a job
report   ratios and verdicts, the table, results.json and report.md
command  ``hvd-ckpt bench train``
"""

"""Logical replicas: hashes of training runs on several numbers of ranks, which are to be the same.

job       the runs of one number of ranks, and their hashes
command   ``hvd-ckpt bench replicas``: jobs in turn, and the table
"""

"""``hvd-ckpt bench tensor``: steps of a GPT in parts, beside those of PyTorch's ``parallelize_module``.

command   the command and its tables
job       the ranks' part
"""

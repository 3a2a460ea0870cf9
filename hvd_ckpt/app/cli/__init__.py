"""The ``hvd-ckpt`` command: one file a command."""

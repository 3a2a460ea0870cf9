"""The ``hvd-ckpt`` command, with one file for each subcommand."""

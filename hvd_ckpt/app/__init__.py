"""The application: the ``hvd-ckpt`` command, the training loop, models, data and the set-up, made of the library."""

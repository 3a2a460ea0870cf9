"""Installation: Horovod's build for the PyTorch at hand, what that needs of the machine, and optional packages.

The modules here need the standard library, click, and ``extras`` and ``folders`` of :mod:`hvd_ckpt.utils` only: ``main.sh`` and
the Docker image run them before anything else of this package works.
"""

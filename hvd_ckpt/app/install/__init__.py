"""Installation: the build of Horovod for the installed PyTorch, its prerequisites, and optional packages.

The modules here only need the standard library, click, psutil, and those of :mod:`hvd_ckpt.utils` that the Dockerfile names, since
``main.sh`` and the Docker image run them before the rest of this package works.
"""

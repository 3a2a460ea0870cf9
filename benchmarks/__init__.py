"""Measurements of speed and memory, beside other engines: ``python -m benchmarks SUITE --help``, in a clone of the repository.

A suite is a file in ``suites``, with a :class:`benchmarks.suite.Suite` of its name, which imports no PyTorch, so that its help is
there at once; an engine is one in ``engines``, or any class of :mod:`hvd_ckpt.app.compare.runner.engines`. ``case`` has cases, jobs
and rows, ``worker`` is what each rank runs unless the suite names a function of its own (``measures``), and ``probes`` are what it
measures beside seconds. Below them is :mod:`hvd_ckpt.app.compare.runner`: jobs, reports, options.
"""

from pathlib import Path

TESTS = Path(__file__).resolve().parents[1] / "tests"

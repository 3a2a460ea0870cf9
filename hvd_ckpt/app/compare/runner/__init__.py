"""The runner under the comparison and under every benchmark.

settings    schemas of settings, from which the options of a command follow, and types of their fields
options     ``bench_command`` and ``BenchRun``: output folder, progress, report, exit status
jobs        ``RankJob`` (a dataclass that the ranks are given), what they tell, and ``run_job``; ``rank`` is their program
report      ``Column`` (a value of each case), ``Table`` and ``Report``: terminal, ``report.md``, ``results.json``, pictures
stats       ``alternating`` rounds (A B C, C B A, ...), ``ratios`` within a round
engine      ``Engine``, the interface of all engines: those on data parallelism (``engines``), and those of ``benchmarks.engines``
"""

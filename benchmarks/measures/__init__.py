"""What suites measure that have a function of their own in place of :class:`benchmarks.worker.Bench`; it imports PyTorch."""

"""Micro-batches: one after the other on one rank, or in stages on several ranks that work at the same time."""

"""Snapshots: what a run needs to resume, on disk."""

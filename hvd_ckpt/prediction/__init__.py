"""Prediction of the memory of a training step, of what it sends, and of its time."""

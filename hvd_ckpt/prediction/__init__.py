"""Prediction of what a training step sends, and of its time, from sizes alone."""

"""Where samples come from, and in which order."""

"""The suites: each module has one, under its own name."""

"""A thin training loop: data, optimizers, progress, snapshots, and the command that joins them."""

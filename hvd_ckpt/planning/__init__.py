"""Which block keeps, recomputes or compresses what its backward pass needs, so that a step fits a memory budget."""

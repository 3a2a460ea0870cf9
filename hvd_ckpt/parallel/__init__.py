"""Extensions of the core: pipeline stages, tensor parallelism and local SGD."""

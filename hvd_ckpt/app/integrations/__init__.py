"""Other frameworks' trainers over this library: :mod:`.lightning` and :mod:`.transformers`."""

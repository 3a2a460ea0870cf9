"""Data sets for the commands: text in tokens, images and volumes, in memory, in files or in shards."""

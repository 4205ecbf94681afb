"""What a run will cost on a cluster: memory, seconds and what limits them, from its configuration alone."""

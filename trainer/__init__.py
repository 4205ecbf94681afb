"""A run: configuration, data, the training loop, checkpoints, metrics, planning."""

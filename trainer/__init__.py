"""A run: configuration, data, the training loop, checkpoints, metrics, planning."""

__version__ = "0.1.0"

"""Validation during training, and commands that evaluate a checkpoint with the training forward pass."""

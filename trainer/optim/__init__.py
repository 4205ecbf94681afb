"""The optimizer and the learning-rate schedule."""

"""Floor 3: when it is computed. Configuration, data, the loop, checkpoints and numbers."""

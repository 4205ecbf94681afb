"""Optimizer and gradient clipping (`optimizer`), learning-rate schedule (`lr_schedule`)."""

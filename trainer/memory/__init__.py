"""Predicted memory: the estimator, its report, and the choice that `recompute = "auto"` makes. Imports no torch."""

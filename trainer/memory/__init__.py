"""Predicted memory: the estimator, its report, and the choice behind `recompute = "auto"`. Imports no torch."""

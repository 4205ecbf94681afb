"""Staying alive: signals, preemption, hangs, anomalies, and how a run says that it ended."""

"""Resilience: stop signals, preemption, hang detection, anomaly detection, and exit markers."""

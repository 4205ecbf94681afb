"""Launching: checks before any worker starts, worker processes, and restarts. Imports no torch."""

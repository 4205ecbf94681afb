"""Metrics of each step, their loggers, progress reports, profiler traces and the log."""

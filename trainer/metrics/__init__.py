"""What a run reports: metrics per step, loggers, progress, profiler traces and the log."""

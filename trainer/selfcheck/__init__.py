"""Self-check: a run made small, on its own mesh beside one process, as proof that both compute the same."""

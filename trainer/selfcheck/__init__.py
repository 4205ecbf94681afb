"""Self-check: compares a reduced run on its mesh with the same run in one process."""

"""Runs as jobs of SLURM: the batch script, and what is done with it."""

"""SLURM jobs: render, submit, query and cancel the batch script of a run."""

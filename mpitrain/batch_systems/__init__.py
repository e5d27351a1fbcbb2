"""Batch systems: what distinguishes Slurm, PBS and LSF, one module for each."""

"""Batch systems: the differences between Slurm, PBS, LSF and Flux, with one module for each."""

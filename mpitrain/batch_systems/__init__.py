"""Batch systems: what distinguishes Slurm, PBS, LSF and Flux, one module for each."""

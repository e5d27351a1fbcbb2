"""Batch jobs: scripts for Slurm, PBS and LSF, site defaults and sweeps."""

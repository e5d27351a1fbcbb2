"""Batch jobs: scripts, submission, site defaults and sweeps."""

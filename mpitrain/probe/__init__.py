"""Measure on a job's ranks what predictions need."""

"""Measurements on a job's ranks, for predictions."""

"""Starts ranks with mpirun, watches them, and restarts them."""

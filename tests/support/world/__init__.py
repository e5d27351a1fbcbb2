"""Ranks that stay: tests call functions on the ranks of one MPI program, which is started once per run of pytest."""

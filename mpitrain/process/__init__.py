"""A rank as a process: launcher environment, signals, status files and the run directory."""

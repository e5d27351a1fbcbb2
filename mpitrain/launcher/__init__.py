"""Start ranks with mpirun, monitor them, and restart them."""

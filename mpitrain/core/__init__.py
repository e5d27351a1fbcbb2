"""Arrays, flat layouts and element kernels on the CPU. Nothing here knows MPI, layers or options."""

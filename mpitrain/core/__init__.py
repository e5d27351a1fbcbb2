"""Arrays, flat layouts and element kernels on the CPU. Independent of MPI, layers and options."""

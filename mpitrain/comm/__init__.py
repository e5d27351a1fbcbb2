"""Communication between ranks: MPI, shared memory, reductions and remote procedure calls."""

"""MPI and shared memory as a backend of ``torch.distributed``."""

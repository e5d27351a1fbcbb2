"""Transports that sum gradients over the GPUs of all workers."""

"""GPUs through CuPy: devices, streams, kernels, and sums of gradients. Imported only if a GPU is used."""

"""GPUs through CuPy: devices, streams, kernels, and sums of gradients. Imported only where a GPU is used."""

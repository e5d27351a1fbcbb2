"""The element kernels as CUDA: their sources, how they are launched, and CuPy, which compiles them."""

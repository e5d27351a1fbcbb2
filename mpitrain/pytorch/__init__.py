"""PyTorch modules and datasets. Modules of this package import torch, and are imported only if a job uses torch."""

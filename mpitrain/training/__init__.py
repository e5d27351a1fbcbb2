"""Training on one rank, from start to end: the training loop, its hooks, and their helpers."""

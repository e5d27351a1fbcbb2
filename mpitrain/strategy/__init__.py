"""Strategies: how the workers update the parameters; one strategy for each ``--mode``."""

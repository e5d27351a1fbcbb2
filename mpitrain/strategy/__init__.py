"""How the ranks agree on the parameters: one module for each ``--mode``."""

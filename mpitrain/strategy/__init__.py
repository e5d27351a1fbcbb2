"""How the ranks agree on the parameters: one strategy for each --mode."""

"""Timing models of the consistency modes, one module for each; they correspond to the modules of ``strategy``."""

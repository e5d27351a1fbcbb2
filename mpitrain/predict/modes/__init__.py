"""Timing models of the consistency modes, one module for each, to be read beside ``strategy``."""

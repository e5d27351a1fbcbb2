"""Trained models: load them from a checkpoint, evaluate them, and compute predictions."""

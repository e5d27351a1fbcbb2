"""The Python API: start runs from scripts and notebooks, and train inside them."""

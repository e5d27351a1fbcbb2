"""Training on GPUs: what a rank gives its device to do, and when; nothing imports this package where there is none."""

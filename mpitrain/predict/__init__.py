"""Predict the speed of training from measurements: pure functions and values, without MPI."""

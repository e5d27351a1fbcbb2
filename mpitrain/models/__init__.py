"""The model interface: loss and gradient of a batch, on one device or several."""

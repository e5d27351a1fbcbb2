"""Parameter servers: the modes async, ssp and backup."""

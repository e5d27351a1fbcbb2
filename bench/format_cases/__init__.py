"""Files in the formats that mpitrain reads, with what must be read from them; see ``bench/formats.py``."""

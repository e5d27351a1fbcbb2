"""What a person sees of a run: the terminal, and the files in its directory."""

"""``mpitrain doctor``: whether this machine can train, found by trying it."""

"""``mpitrain doctor``: check by experiment whether this machine can train."""

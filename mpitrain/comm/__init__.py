"""How ranks share memory and average vectors: the only package, with ``strategy``, that moves data."""

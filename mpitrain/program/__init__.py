"""Programs, which need not use this package, as ranks: their environment, their output, and how they end."""

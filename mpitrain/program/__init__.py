"""Programs that need not know this package, as ranks: their environment, their output, and how they end."""

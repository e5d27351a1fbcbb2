"""Programs as ranks: their environment, output and end. Programs need not use this package."""

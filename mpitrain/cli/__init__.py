"""The mpitrain command."""

"""Models made of `Attention`."""

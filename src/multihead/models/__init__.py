"""Models made of `Attention`, the files that they are saved as, and how they generate."""

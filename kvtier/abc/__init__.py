"""Contracts only: what a codec and a tier promise. Implementations import these, never the other way round."""

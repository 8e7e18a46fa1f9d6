"""Scores of cached keys from query statistics, and the selection of the best of them (TriAttention, arXiv
2604.04921)."""

"""Faults as a product: what can happen to stored pages, done on purpose, and what must hold then (`docs/faults.md`)."""

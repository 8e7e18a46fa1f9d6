"""Packs kept rows of paged pools in place, in ascending order. Knows no algorithm: who chooses the rows is
elsewhere."""

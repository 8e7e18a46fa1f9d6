"""Compacting a context: fewer rows that stand for all of its tokens. Needs torch; nothing here knows a model.

`prefix`: what methods return. Methods are modules of their own.
"""

"""Data that kvtier ships, each folder with its own licence."""

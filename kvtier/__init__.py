"""kvtier: cold KV cache pages as NVFP4, kept in tiers, decoded on their way back."""

__version__ = "0.1.0.dev0"

"""The random Llama of `kvtier.testing`, by the name that tests know it by."""

from kvtier.testing.tiny_model import DIM, HEADS, HIDDEN, KV_HEADS, LAYERS, VOCAB, write_model

__all__ = ["DIM", "HEADS", "HIDDEN", "KV_HEADS", "LAYERS", "VOCAB", "write_model"]

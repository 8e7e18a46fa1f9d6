"""The Redis tier: pages shared between machines, in Redis, Valkey, or anything that speaks their protocol."""

"""Trace replay: what a stack of tiers would have answered, had it seen a recorded stream of requests.

`formats` reads traces, `page` says what a block of tokens weighs, `stack` describes tiers, `simulate` runs the cache
(native; `reference` is the same in plain Python), `closed` runs it with a given number of concurrent sessions, `sweep`
over sizes and codecs, `live` against the real store. `docs/replay.md` states the conventions.
"""

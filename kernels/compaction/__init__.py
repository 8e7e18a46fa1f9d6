"""Plain tensor arithmetic of compaction methods (KVzip, Attention Matching). Knows no model and no engine."""

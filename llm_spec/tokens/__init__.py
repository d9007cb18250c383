"""The token-level core: pure functions and small objects over numpy arrays. No model, no I/O."""

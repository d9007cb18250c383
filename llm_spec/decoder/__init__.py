"""One request: its strategy, its calls, its limits, its result. Home of SpeculativeDecoder and its config."""

"""Models in this process: the loop, sampling, acceptance, lookahead and message formats."""

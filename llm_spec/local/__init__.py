"""A model in this process: the loop, sampling, acceptance, lookahead, and how models write messages."""

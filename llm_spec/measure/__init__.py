"""What is measured: the clock, tokens of text, and how fast a target and its draft are."""

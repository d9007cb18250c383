"""`probe` and `score`: calls of rows, which give the target's own token after each of several prefixes."""

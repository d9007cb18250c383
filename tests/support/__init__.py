"""What several test modules share: doubles, servers with the wire formats of others, checks, tiny models."""

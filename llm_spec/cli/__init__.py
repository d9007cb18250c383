"""`llm-spec`: its commands."""

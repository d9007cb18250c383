"""`llm-spec bench`: contenders, measuring, figures, reports; nothing but the command imports it."""

"""The `llm-spec` command and its subcommands."""

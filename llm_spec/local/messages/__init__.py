"""Parsers and grammars of the tool calls and reasoning in models' text."""

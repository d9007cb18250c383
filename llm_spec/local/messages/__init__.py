"""How models write tool calls and reasoning in their text: reading them, and grammars for them."""

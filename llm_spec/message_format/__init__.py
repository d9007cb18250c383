"""How models in this process write reasoning and tool calls in their text, and how that text is read.

`formats.py` is the table of formats. `parser.py` reads an answer as it is written, `calls.py` one call of it.
"""

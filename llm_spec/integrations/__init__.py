"""Adapters for agent frameworks, one module each.

Importing an adapter needs its extra: `pip install 'llm-spec[name]'`.
"""

"""Adapters for agent frameworks, one module each; importing one needs its extra (`pip install 'llm-spec[name]'`)."""

"""Ways for a target to verify a draft (`registry.py` lists them), and the choice among them (`choice.py`)."""

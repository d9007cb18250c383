"""Ways for a target to verify a draft (`entry_points.py` lists them), and the choice among them (`choice.py`)."""

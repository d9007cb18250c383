"""What `tools/record_behaviour.py` records: cases, and the plain data that is kept of them."""

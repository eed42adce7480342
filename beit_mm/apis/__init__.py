"""What users call from Python: imports nothing, so that each call loads only what it needs."""

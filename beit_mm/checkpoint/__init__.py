"""Weights from any BEiT file into a model and out again, without running what a file holds."""

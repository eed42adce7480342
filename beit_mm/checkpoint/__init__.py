"""Weights from any BEiT file into a model and out again, without running what a file holds.

read        reading and writing files
find        the file that a path, an address or a name stands for
names       the formats of other code bases, state dicts from one into another, and what a file says of itself
checkpoint  class Checkpoint, an opened file; mmengine's loader; weights made to fit a backbone, and what became of each
convert     files of other formats, and files to give away
"""

"""Weights from any BEiT file into a model and out again, without running what a file holds.

io       finding, reading and writing files
names    the formats of other code bases, and state dicts from one into another
fit      weights made to fit a backbone, and what became of each
loader   all of it as mmengine's way to read files
convert  files of other formats, and files to give away
"""

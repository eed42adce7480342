"""Weights from any file into a model and out again, without running what a file holds.

reader, inert_pickle, records    a file's content as plain containers and tensors
locate, content, origin          where files lie, and what they hold beside weights
keys, formats, hf                names and layouts of the other code bases
fitting, report                  weights made to fit a backbone, and what became of each
loading                          all of it as mmengine's way to read files
convert, writing                 files of other formats, and files to give away
"""

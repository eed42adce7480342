"""BEiT (arXiv 2106.08254) as a plugin of MMPretrain and MMSegmentation."""
__version__ = '0.1.0'

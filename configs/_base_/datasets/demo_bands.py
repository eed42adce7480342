# The values of data/bands that become 0 and 255, and mean and standard deviation on that scale for the six bands:
# tools/datasets/band_statistics.py data/bands/train
low = [1090, 950, 830, 2100, 1700, 1240]
high = [2010, 2060, 2200, 4980, 3810, 2770]
mean = [129, 127, 126, 125, 128, 128]
std = [46, 46, 44, 42, 47, 51]

"""Images with six bands in data/bands/train and data/bands/val. The leaf sets pipelines, batch and dataset type."""
data_root = 'data/bands'

# The values that become 0 and 255, and mean and standard deviation on that scale for the six bands:
# tools/datasets/band_statistics.py data/bands/train
low = [1090, 950, 830, 2100, 1700, 1240]
high = [2010, 2060, 2200, 4980, 3810, 2770]
mean = [129, 127, 126, 125, 128, 128]
std = [46, 46, 44, 42, 47, 51]

train_dataloader = dict(
    num_workers=1, persistent_workers=True, drop_last=True,
    sampler=dict(type='beit_mm.SeededSampler', shuffle=True),
    collate_fn=dict(type='default_collate'),
    dataset=dict(data_root=data_root, data_prefix='train', on_error='skip'))
val_dataloader = dict(
    batch_size=64, num_workers=1, persistent_workers=True,
    sampler=dict(type='beit_mm.SeededSampler', shuffle=False, seed=0),
    collate_fn=dict(type='default_collate'),
    dataset=dict(data_root=data_root, data_prefix='val', test_mode=True))
test_dataloader = val_dataloader

"""Pure functions on arrays and tensors: no nn.Module, no OpenMMLab import."""

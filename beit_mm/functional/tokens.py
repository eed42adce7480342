"""Picking tokens out of a sequence by index, and patches out of an image."""
import torch
from torch import Tensor


def masked_positions(mask: Tensor) -> Tensor:
    """Indices of the masked patches of each image, in one rectangular tensor.

    Images of a batch hold different numbers of masked patches (64 to 75 of 196 with the released
    generator). A boolean gather would make the host wait for the device; on the mask's CPU copy this
    costs nothing, and the few padded places (0.7 % for 75) are left out of the loss.

    Args:
        mask: bool (B, h, w), True = masked.

    Returns:
        int64 (B, K), row-major patch indices in rising order, padded with -1; K is the largest count
        in the batch, at least 1.
    """
    flat = mask.flatten(1)
    counts = flat.sum(dim=1, keepdim=True)
    num_slots = max(int(counts.max()), 1)
    order = flat.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :num_slots]
    return order.masked_fill(torch.arange(num_slots, device=mask.device) >= counts, -1)


def take_tokens(x: Tensor, index: Tensor) -> Tensor:
    """Entries of a sequence x (B, N, C) or (B, N) at an int64 index (B, K): (B, K, C) or (B, K)."""
    if x.dim() == 3:
        index = index.unsqueeze(-1).expand(-1, -1, x.shape[-1])
    return x.gather(1, index)


def patchify(images: Tensor, patch_size: int) -> Tensor:
    """Cuts images (B, C, H, W) into patches (B, N, C*patch_size**2), channels slowest.

    The order of the values is that of the patch embedding's convolution weight.
    """
    patches = images.unfold(2, patch_size, patch_size).unfold(3, patch_size, patch_size)
    return patches.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)

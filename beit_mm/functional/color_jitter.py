"""Brightness, contrast and saturation jitter of a batch with given parameters, on any device.

Each of the three blends the image with something plainer: black, a uniform gray, its own gray version.
The uniform gray is the mean of the *whole image* at that moment, so that jitter after the crop does
what jitter before the crop would do.

Parameters, 7 numbers: brightness, contrast and saturation factor, gray level for contrast (0-255), and
the order of the operations (three numbers, 0 brightness, 1 contrast, 2 saturation).
"""
import torch

LUMA = (0.299, 0.587, 0.114)  # red, green, blue in gray (ITU-R 601)
BRIGHTNESS, CONTRAST, SATURATION = range(3)


def jitter_images(images: torch.Tensor, params: torch.Tensor) -> torch.Tensor:
    """Jitter a batch, every image with its own factors and order.

    Args:
        images: float (B, 3, H, W), RGB, 0-255.
        params: float (B, 7), the numbers above.

    Returns:
        float (B, 3, H, W), 0-255, clamped after each operation.

    Differs from Pillow (and from datasets.color_jitter, on the CPU) in: fractions of levels are kept,
    which makes it 1 level brighter on average.
    """
    factors, level, order = params[:, :3], params[:, 3].view(-1, 1, 1, 1), params[:, 4:].long()
    luma = images.new_tensor(LUMA).view(1, 3, 1, 1)
    for operation in order.T:
        factor = factors.gather(1, operation[:, None]).view(-1, 1, 1, 1)
        operation = operation.view(-1, 1, 1, 1)
        plain = torch.where(operation == CONTRAST, level, 0)  # 0: black, for brightness
        plain = torch.where(operation == SATURATION, (images * luma).sum(1, keepdim=True), plain)
        images = (plain + factor * (images - plain)).clamp(0, 255)
    return images

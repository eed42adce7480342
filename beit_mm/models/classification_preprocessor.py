"""From a batch of images and labels to what the classifier takes, on the device."""
import torch
from mmpretrain.models import ClsDataPreprocessor

from beit_mm.registry import MODELS


@MODELS.register_module()
class ClassificationDataPreprocessor(ClsDataPreprocessor):
    """mmpretrain's ClsDataPreprocessor with random erasing between normalisation and mixup or cutmix.

    In training the box that `beit_mm.RandomErasing` drew (`erase_box` of a sample: top, left, height, width) is filled
    with noise of mean 0 and standard deviation 1, one number for each pixel and channel, from the generator of the
    images' device.

    Args: as ClsDataPreprocessor.

    Source: timm `data/loader.py`, which erases on the device too.
    """

    def forward(self, data: dict, training: bool = False) -> dict:
        """Prepares one batch; returns dict(inputs=float (B, 3, H, W), data_samples)."""
        data = super().forward(data, training=False)  # normalises and makes one-hot labels, but does not mix yet
        inputs, samples = data['inputs'], data['data_samples']
        if not training or samples is None:
            return data
        for image, sample in zip(inputs, samples, strict=True):
            if 'erase_box' in sample:
                top, left, height, width = sample.erase_box
                image[:, top:top + height, left:left + width].normal_()
        if self.batch_augments is not None and 'gt_score' in samples[0]:
            scores = torch.stack([sample.gt_score for sample in samples])
            data['inputs'], scores = self.batch_augments(inputs, scores)
            for sample, score in zip(samples, scores, strict=True):
                sample.set_gt_score(score)
        return data

"""The metric of segmentors."""

from typing import Any

from mmseg.evaluation import IoUMetric as MMSegIoUMetric

from beit_mm.registry import METRICS


@METRICS.register_module()
class IoUMetric(MMSegIoUMetric):
    """mmseg's, which also returns the IoU of each class: `save_best` may follow one, such as 'IoU/road'.

    Returns (%):
        mmseg's aAcc, mIoU, mAcc, ..., and IoU/<class>, nan for a class that is neither labelled nor predicted.
    """

    def compute_metrics(self, results: list) -> dict[str, Any]:
        metrics = super().compute_metrics(results)
        if self.format_only:
            return metrics
        areas = [sum(areas) for areas in zip(*results, strict=True)]  # intersect, union, predicted, labelled
        found = self.total_area_to_metrics(*areas, ['mIoU'], self.nan_to_num)
        ious = dict(zip(self.dataset_meta['classes'], (100 * found['IoU']).tolist(), strict=True))
        return metrics | {f'IoU/{name}': round(iou, 2) for name, iou in ious.items()}

"""The result of a linear probe: accuracy layer by layer."""
from collections.abc import Sequence

from mmengine.evaluator import BaseMetric
from mmengine.logging import print_log

from beit_mm.registry import METRICS


@METRICS.register_module()
class LayerAccuracy(BaseMetric):
    """Accuracy of each layer that a LinearProbe trains a classifier for, logged as a table.

    Returns (percent, except best_layer; all under `accuracy/`):
        layer_<i>: right predictions from block i, counted from 0.
        best: the highest of them. Choosing the layer on the images that are reported flatters a little.
        best_layer: whose it is.
    """

    default_prefix = 'accuracy'

    def process(self, data_batch: object, data_samples: Sequence[dict]) -> None:
        """Keeps which layers are right about each image."""
        for sample in data_samples:
            label = int(sample['gt_label'])
            self.results.append({layer: found == label for layer, found in sample['layer_labels'].items()})

    def compute_metrics(self, results: list[dict[int, bool]]) -> dict[str, float]:
        """Joins the images of all ranks."""
        accuracy = {layer: 100 * sum(result[layer] for result in results) / len(results) for layer in results[0]}
        best = max(accuracy, key=accuracy.get)
        rows = [f'{layer:5} {value:9.2f}{" *" if layer == best else ""}' for layer, value in accuracy.items()]
        title = f'Linear probes on {len(results)} images (layers from 0, best *)'
        print_log('\n'.join([title, 'layer  accuracy', *rows]), logger='current')
        return {**{f'layer_{layer}': value for layer, value in accuracy.items()}, 'best': accuracy[best],
                'best_layer': best}

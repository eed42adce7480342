"""Fits the head of a classifier to the features of all images, which its frozen backbone computes once."""

from collections.abc import Iterator
from itertools import chain

import torch
import torch.nn.functional as F
from mmengine.dist import all_gather

from beit_mm.engine.logs import ProgressHook
from beit_mm.engine.loops import IterLoop, batches
from beit_mm.engine.steps import unwrap
from beit_mm.errors import log
from beit_mm.features.evaluation import choose_penalty, mean_and_std
from beit_mm.precision import inference_autocast
from beit_mm.registry import LOOPS


@LOOPS.register_module()
class HeadFitLoop(IterLoop):
    """An IterLoop whose one step reads all images once and makes the linear head that of `choose_penalty`."""

    def endless_batches(self) -> Iterator:
        yield batches(self.dataloader, epoch=0)

    @torch.no_grad()
    def run_iter(self, stream: Iterator[dict]) -> None:
        runner, model = self.runner, unwrap(self.runner).eval()
        progress = [hook for hook in runner.hooks if isinstance(hook, ProgressHook)]
        first = next(stream)
        runner.call_hook('before_train_iter', batch_idx=0, data_batch=first)
        for hook in progress:
            hook.before_val(runner)
        parts, samples = [], []
        for number, batch in enumerate(chain([first], stream), start=1):
            inputs = model.data_preprocessor(batch)['inputs']
            with inference_autocast(inputs.device):
                parts.append(model.head.pre_logits(model.extract_feat(inputs)).float())  # B, C
            samples += batch['data_samples']
            for hook in progress:
                hook.show_batch(number, len(self.dataloader), 'features')
        own = torch.cat(parts)
        rows = torch.tensor([(sample.sample_idx, int(sample.gt_label)) for sample in samples], device=own.device)
        features, (images, labels) = torch.cat(all_gather(own)), torch.cat(all_gather(rows)).unbind(1)
        (mean, std), layer = mean_and_std(features), model.head.fc
        number = len(layer.weight)
        fitted, found = choose_penalty(
            (features - mean) / std, labels, number, images, by_class=False, seed=runner.seed
        )
        layer.weight.copy_(fitted.weight / std)
        layer.bias.copy_(fitted.bias - layer.weight @ mean)
        log(f'The head is fitted to {len(features):,} features: {found}')
        loss = F.cross_entropy(layer(features), labels)
        all_images = dict(inputs=own, data_samples=samples)
        runner.call_hook('after_train_iter', batch_idx=0, data_batch=all_images, outputs=dict(loss=loss))
        self._iter += 1

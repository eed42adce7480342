"""How well frozen features tell classes apart, watched during pretraining."""
import torch
import torch.nn.functional as F
from mmengine.dist import all_gather
from mmengine.hooks import Hook
from mmengine.model import is_model_wrapper
from mmengine.runner import Runner
from mmpretrain.structures import DataSample
from torch import Tensor, nn
from torch.utils.data import DataLoader

from beit_mm.registry import HOOKS

CHUNK = 1024  # images compared with all training images at a time


def knn_predict(features: Tensor, known: Tensor, labels: Tensor, num_classes: int, k: int = 20,
                temperature: float = 0.07) -> Tensor:
    """Classes by a vote of the nearest neighbours, each weighted with exp(cosine / temperature).

    Args:
        features: (N, C) to be classified.
        known: (M, C) whose classes are known.
        labels: int64 (M,) classes of `known`.
        num_classes: number of classes.
        k: neighbours that vote; at most M do.
        temperature: the lower, the more the nearest count.

    Returns:
        int64 (N,).

    Source: facebookresearch/dino `eval_knn.py`.
    """
    known = F.normalize(known, dim=1)
    predicted = []
    for chunk in F.normalize(features, dim=1).split(CHUNK):
        cosine, nearest = (chunk @ known.T).topk(min(k, len(known)), dim=1)
        votes = cosine.new_zeros(len(chunk), num_classes)
        votes.scatter_add_(1, labels[nearest], ((cosine - 1) / temperature).exp())
        predicted.append(votes.argmax(dim=1))
    return torch.cat(predicted)


def index_of(sample: DataSample) -> int:
    """Position of a image in its dataset."""
    if 'sample_idx' not in sample:
        raise ValueError("KNNHook tells images apart by 'sample_idx'; its pipelines end with PackInputs without "
                         'meta_keys, or with sample_idx among them')
    return sample.sample_idx


@HOOKS.register_module()
class KNNHook(Hook):
    """Logs `knn_accuracy` (percent) after each validation: labelled images classified by their nearest neighbours.

    The features are the mean of a block's patch tokens for the whole, unmasked image. Loss and `mim_acc` say how well
    the task is solved, this says what the features are good for; the labels have no part in training.

    Args:
        train_dataloader, val_dataloader: configs with an ImageFolder whose pipeline crops to one size and ends with
            PackInputs; a subset of the images will do. They are read at every validation.
        layer: block whose output is taken, from 0, negative from the end; None: the last of the middle third.
        k, temperature: see `knn_predict`.

    Raises:
        ValueError: the two datasets have different classes.
    """

    def __init__(self, train_dataloader: dict, val_dataloader: dict, layer: int | None = None, k: int = 20,
                 temperature: float = 0.07):
        self.configs = train_dataloader, val_dataloader
        self.loaders: list[DataLoader] = []
        self.layer = layer
        self.k = k
        self.temperature = temperature

    def before_train(self, runner: Runner) -> None:
        """Builds the loaders, so that a wrong path shows before the first step."""
        self.loaders = [runner.build_dataloader(config, seed=0) for config in self.configs]
        train, val = (loader.dataset.metainfo['classes'] for loader in self.loaders)
        if train != val:
            raise ValueError(f'KNNHook: its train_dataloader has {len(train)} classes, its val_dataloader {len(val)}, '
                             'or their names differ; give both datasets the same classes=...')

    def after_val_epoch(self, runner: Runner, metrics: dict | None = None) -> None:
        """Classifies the images; runs before the log is written."""
        if not self.loaders:  # a validation outside training
            return
        model = runner.model.module if is_model_wrapper(runner.model) else runner.model
        (known, labels), (features, truth) = (self._extract(model, loader) for loader in self.loaders)
        classes = len(self.loaders[0].dataset.metainfo['classes'])
        predicted = knn_predict(features, known, labels, classes, self.k, self.temperature)
        accuracy = 100 * (predicted == truth).float().mean().item()
        runner.message_hub.update_scalar('val/knn_accuracy', accuracy)
        if metrics is not None:
            metrics['knn_accuracy'] = accuracy  # CheckpointHook's save_best can follow it

    @torch.no_grad()
    def _extract(self, model: nn.Module, loader: DataLoader) -> tuple[Tensor, Tensor]:
        """Features (N, C) and classes (N,) of a dataset, in its order, on the model's device."""
        blocks = model.backbone.blocks
        block = blocks[2 * len(blocks) // 3 - 1 if self.layer is None else self.layer]
        preprocessor = model.data_preprocessor
        device = preprocessor.mean.device
        taken, rows = [], []
        handle = block.register_forward_hook(lambda module, inputs, tokens: taken.append(tokens[:, 1:].mean(dim=1)))
        try:
            for batch in loader:
                images = (batch['inputs'].to(device).float() - preprocessor.mean) / preprocessor.std
                with torch.autocast(device.type, torch.bfloat16, enabled=device.type == 'cuda'):
                    model.backbone(images)
                rows += [(index_of(sample), int(sample.gt_label)) for sample in batch['data_samples']]
        finally:
            handle.remove()
        features = torch.cat(all_gather(torch.cat(taken).float()))
        index, label = torch.cat(all_gather(torch.tensor(rows, device=device))).unbind(1)
        # Each image once: the samplers repeat some to give each process as many.
        order = index.new_full((len(loader.dataset),), -1)
        order[index] = torch.arange(len(index), device=device)
        order = order[order >= 0]  # drop_last leaves some out
        return features[order], label[order]

"""Features of images from the checkpoint of any BEiT, and files of them."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mmengine.dataset import Compose
from mmengine.device import get_device
from mmengine.registry import DefaultScope
from torch import Tensor

from beit_mm.checkpoint.checkpoint import Checkpoint, CheckpointInput
from beit_mm.checkpoint.names import IMAGENET
from beit_mm.datasets.image_folder import extensions_of, scale_decoding
from beit_mm.features.probing import hidden_states, usual_layer
from beit_mm.features.reader import (
    Device,
    FoundPath,
    ImageInput,
    ImageReader,
    check_on_error,
    iterate_images,
    usual_preparation,
)
from beit_mm.files import atomic_file
from beit_mm.models.vit import BEiTBackbone, block_indices
from beit_mm.precision import inference_autocast
from beit_mm.registry import TRANSFORMS
from beit_mm.terminal import UserError, with_bar

KINDS = ('mean', 'class_token', 'patches')


class FeatureExtractor(ImageReader):
    """The hidden states of a BEiT for whole, unmasked images, from any of its checkpoints alone.

    By default the mean of the patches after two thirds of the blocks. BEiT's class token was never trained to sum an
    image up (BEiT v2's was), and its last blocks turn from what an image shows to the tokens that they predict. Hidden
    states are those between the blocks: the final norm, which only some checkpoints have, is not applied. Images are
    normalised as the checkpoint says, by ImageNet's mean and std where it does not.

    Args:
        checkpoint: path, URL or name in `list_models` of a BEiT in any format, of any task.
        device: such as 'cuda:1' or 'cpu'; None for what there is.
        size: of the prepared image in pixels: its side, or with `whole` its short side. None: the checkpoint's.
        whole: all of an image in its own shape, both sides whole patches. Otherwise the middle of it, as classifiers
            see it.
        mean, std: of each channel, pixels 0-255, instead of the checkpoint's.
        bands: settings of LoadBands, for a model of other images than RGB.

    Raises:
        FileNotFoundError, CheckpointError: as BEiTBackbone.from_checkpoint.
        ValueError: a size below a patch, or another number of means than of channels.

    Attributes:
        backbone: the BEiTBackbone.
        mean, std: float (C, 1, 1), of pixels 0-255.
        pipeline: configs of the transforms that prepare an image.
    """

    def __init__(
        self,
        checkpoint: CheckpointInput,
        device: Device = None,
        size: int | None = None,
        whole: bool = False,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        bands: dict | None = None,
    ):
        opened = Checkpoint.open(checkpoint)
        self.checkpoint = str(opened)
        self.device = torch.device(device or get_device())
        self.backbone_arguments = opened.backbone_arguments()
        self.backbone = BEiTBackbone.from_checkpoint(opened).to(self.device)
        patch, channels = self.backbone.patch_size, self.backbone.patch_embed.proj.in_channels
        if size is not None and size < patch:
            raise UserError(f'size is {size} pixels; a patch of {self.checkpoint} has {patch}')
        known = {**IMAGENET, **self.backbone.load_report.preprocessing}
        self.mean, self.std = (
            torch.tensor(values, dtype=torch.float32, device=self.device).view(-1, 1, 1)
            for values in (mean or known['mean'], std or known['std'])
        )
        if {len(self.mean), len(self.std)} - {1, channels}:
            raise UserError(
                f'{self.checkpoint} takes images of {channels} channels; mean has {len(self.mean)}, std '
                f'{len(self.std)}: give mean=... and std=...'
            )
        own = tuple(side * patch for side in self.backbone.grid)
        if whole:
            resize = dict(type='beit_mm.ResizeToPatches', short_side=size or min(own), patch_size=patch)
            prepare = [resize, dict(type='PackInputs')]
        else:
            prepare = usual_preparation((size, size) if size else own, 'pillow' if channels == 3 else 'cv2')
        load = dict(type='beit_mm.LoadImage') if channels == 3 else dict(bands or {}, type='beit_mm.LoadBands')
        self.pipeline = [load, *prepare]
        with DefaultScope.overwrite_default_scope('mmpretrain'):
            self._load, *steps = [TRANSFORMS.build(step) for step in self.pipeline]
        self._prepare = Compose(steps)
        scale_decoding([self._load, *steps])
        self._reads_rgb = True

    def with_random_weights(self, seed: int = 0) -> 'FeatureExtractor':
        """The same with the backbone as it is before any training."""
        twin = copy.copy(self)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            twin.backbone = BEiTBackbone(**self.backbone_arguments).to(self.device).eval()
        return twin

    def layer(self, layer: int | None) -> int:
        """A block's number from 0, of one that may be counted from the end; None is the usual one."""
        depth = self.backbone.num_layers
        return usual_layer(depth) if layer is None else block_indices(layer, depth)[0]

    def prepared(self, image: ImageInput) -> Tensor:
        """The pixels that the backbone sees of an image, before normalisation: uint8 or float (C, H, W), 0-255."""
        return self._sample(image)['inputs']

    def __call__(
        self,
        images: ImageInput | Sequence[ImageInput],
        kinds: Sequence[str] = KINDS,
        layers: int | Sequence[int] | None = None,
        batch_size: int = 32,
        on_error: str = 'raise',
    ) -> Iterator[dict[str, Any]]:
        """Features of images, a batch at a time as they are asked for.

        Args:
            images: as of ClassificationInferencer.
            kinds: which to return.
            layers: block, 0-based, negative from the end; None for the usual one. Of several each result has a first
                axis.
            batch_size: images computed at a time, where they have one shape.
            on_error: what an image that cannot be read does: 'raise' ends the call, 'skip' has dict(path=its file,
                error=what is wrong) in its place.

        Yields:
            For each image dict(path=its file, None for an array or image; class_token=(C,); mean=(C,) of the patches;
            patches=(h, w, C)), float32.

        Raises:
            FileNotFoundError, UnreadableImageError, TypeError: as ClassificationInferencer.
            ValueError: another kind, layer, policy or batch size.
        """
        check_on_error(on_error)
        if unknown := [kind for kind in kinds if kind not in KINDS]:
            raise UserError(f'kind is {unknown[0]!r}; choose one of {KINDS}')
        if batch_size < 1:
            raise UserError(f'batch_size is {batch_size}; expected 1 or more')
        blocks = [self.layer(layer) for layer in (layers if isinstance(layers, Sequence) else [layers])]
        return self._results(images, kinds, blocks, isinstance(layers, Sequence), batch_size, on_error)

    def of_files(self, labels: Mapping[str, int]) -> tuple[Tensor, Tensor, list[dict[str, Any]]]:
        """Features of files with labels; of unreadable ones only what is wrong with them.

        Args:
            labels: path -> class.

        Returns:
            float32 (N, C), the mean of the patches after `usual_layer`; int64 (N,), the labels; for each file, read or
            not, dict(path) or dict(path, error).
        """
        samples = list(self([FoundPath(path) for path in labels], ['mean'], on_error='skip'))
        read = [sample for sample in samples if 'error' not in sample]
        width = self.backbone.embed_dims
        features = np.array([sample['mean'] for sample in read], np.float32).reshape(len(read), width)
        found = [{key: value for key, value in sample.items() if key != 'mean'} for sample in samples]
        return torch.from_numpy(features), torch.tensor([labels[sample['path']] for sample in read]), found

    def _results(
        self, images: Any, kinds: Sequence[str], blocks: list[int], several: bool, batch_size: int, on_error: str
    ) -> Iterator[dict[str, Any]]:
        sources = iterate_images(images, extensions_of([self._load]))
        while batch := list(islice(sources, batch_size)):
            read = [self._read(image, on_error) for image in batch]
            found = iter(self._features([sample['inputs'] for sample in read if 'error' not in sample], kinds, blocks))
            for image, sample in zip(batch, read, strict=True):
                if 'error' in sample:
                    yield sample
                    continue
                features = {kind: values if several else values[0] for kind, values in next(found).items()}
                yield dict(path=str(image) if isinstance(image, (str, Path)) else None, **features)

    @torch.no_grad()
    def _features(self, images: list[Tensor], kinds: Sequence[str], blocks: list[int]) -> Iterator[dict[str, Any]]:
        """Arrays with a first axis of blocks, of images uint8 (C, H, W)."""
        one_shape = len({image.shape for image in images}) == 1
        for batch in [torch.stack(images)] if one_shape else [image[None] for image in images]:
            normalised = (batch.to(self.device).float() - self.mean) / self.std  # B, C, H, W
            with inference_autocast(self.device):
                states, grid = hidden_states(self.backbone, normalised, blocks)
            x = torch.stack(states, dim=1).float()  # B, layers, N, C
            pooled = dict(
                class_token=lambda x=x: x[:, :, 0],
                mean=lambda x=x: x[:, :, 1:].mean(dim=2),
                patches=lambda x=x, grid=grid: x[:, :, 1:].unflatten(2, grid),
            )
            arrays = {kind: pooled[kind]().cpu().numpy() for kind in kinds}
            yield from ({kind: values[i] for kind, values in arrays.items()} for i in range(len(batch)))


def embed(
    checkpoint: CheckpointInput,
    images: ImageInput | Sequence[ImageInput],
    out: str | Path | None = None,
    kind: str = 'mean',
    layer: int | None = None,
    batch_size: int = 32,
    device: Device = None,
    progress: bool = True,
    on_error: str = 'raise',
    **options: Any,
) -> dict[str, Any]:
    """Features of images, in one array or one file.

    Args:
        checkpoint, device, options: of FeatureExtractor.
        images, layer, batch_size, on_error: of its call.
        out: file to write too; see `save_features`.
        kind: 'mean' of the patches, 'class_token', or 'patches'.
        progress: show a bar, where the standard error output is a terminal.

    Returns:
        dict(features=float32 (N, C), of 'patches' a list of (h, w, C); paths=list of the files, '' for arrays;
        skipped=list of dict(path, error) of what could not be read; checkpoint, kind, layer=what they are of).

    Raises:
        As FeatureExtractor and its call; ValueError: another ending of `out`; ImportError: what writes it is missing;
        FileNotFoundError: none of the images could be read.
    """
    if out is not None:
        out = Path(out).expanduser()
        check_ending(out)  # before the work, not after it
    extractor = FeatureExtractor(checkpoint, device, **options)
    sources = list(iterate_images(images, extensions_of([extractor._load])))
    features, paths, skipped = [], [], []
    samples = extractor(sources, [kind], layer, batch_size, on_error)
    for sample in with_bar(samples, len(sources)) if progress else samples:
        if 'error' in sample:
            skipped.append(sample)
        else:
            features.append(sample[kind])
            paths.append(sample['path'] or '')
    if not features:
        raise FileNotFoundError(f'no features: none of {len(sources)} images could be read')
    found = dict(
        features=features if kind == 'patches' else np.stack(features),
        paths=paths,
        skipped=skipped,
        checkpoint=str(checkpoint),
        kind=kind,
        layer=extractor.layer(layer),
    )
    if out is not None:
        save_features(found, out)
    return found


# --- files ----------------------------------------------------------------------------------------


def save_features(found: dict[str, Any], out: str | Path) -> None:
    """Writes what `embed` returns, without `skipped`; nothing is left half written.

    Args:
        out: .npz file: numpy arrays `features` and `paths`, and `checkpoint`, `kind` and `layer`; of patches
            `features` has those of all images after one another (sum of h * w, C) and `grids` their (h, w).

    Raises:
        ValueError: another ending.
    """
    check_ending(out)
    arrays = {name: np.array(found[name]) for name in ('checkpoint', 'kind', 'layer')}
    features = found['features']
    if found['kind'] == 'patches':
        arrays['grids'] = np.array([maps.shape[:2] for maps in features])
        features = np.concatenate([maps.reshape(-1, maps.shape[2]) for maps in features])
    with atomic_file(out) as file:
        np.savez(file, features=features, paths=np.array(found['paths'], dtype=np.str_), **arrays)


def load_features(path: str | Path) -> dict[str, Any]:
    """What `save_features` has written: features, paths, checkpoint, kind and layer. Nothing in it is executed.

    Raises:
        FileNotFoundError: no such file; ValueError: another ending.
    """
    check_ending(path)
    if not Path(path).is_file():
        raise FileNotFoundError(f'no file {str(path)!r}; expected features that embed has written')
    with np.load(path) as content:
        found = {name: content[name].item() for name in ('checkpoint', 'kind', 'layer')}
        features = content['features']
        if 'grids' in content:
            features = _split(features, content['grids'])
        return dict(features=features, paths=content['paths'].tolist(), **found)


def check_ending(out: str | Path) -> None:
    """Raises ValueError for a file that is no .npz."""
    if Path(out).suffix != '.npz':
        raise UserError(f'{str(out)!r}: features are written to files ending in .npz')


def _split(flat: np.ndarray, grids: np.ndarray) -> list[np.ndarray]:
    """Patches (sum of h * w, C) into a list of (h, w, C)."""
    ends = np.cumsum(grids.prod(axis=1))[:-1]
    return [maps.reshape(*grid, -1) for maps, grid in zip(np.split(flat, ends), grids, strict=True)]

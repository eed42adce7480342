"""Computes features of images from any source with a BEiT from any checkpoint."""

import copy
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from mmengine.dataset import Compose
from mmengine.device import get_device
from PIL import Image
from torch import Tensor

from beit_mm.checkpoint.checkpoint import Checkpoint, CheckpointInput, PerChannel, normalisation_of
from beit_mm.checkpoint.description import usual_geometry
from beit_mm.checkpoint.find import PHOTOS
from beit_mm.datasets.image_folder import EXTENSIONS, extensions_of, list_images, scale_decoding
from beit_mm.datasets.reading import LoadBands, LoadImage, UnreadableImageError, rgb_array, unreadable, with_image
from beit_mm.datasets.segmentation_folder import check_images_alone
from beit_mm.errors import UserError, check_choice
from beit_mm.files import atomic_file, quoted
from beit_mm.models.vit import BEiTBackbone, block_indices
from beit_mm.precision import inference_autocast
from beit_mm.registry import TRANSFORMS, building
from beit_mm.terminal import with_bar

ImageInput: TypeAlias = str | Path | np.ndarray | Image.Image
Sources: TypeAlias = ImageInput | Sequence[ImageInput]
Device: TypeAlias = str | torch.device | None
WRITTEN = ('', '.csv', '.json', '.npz', '.png')  # endings of what verbs write, first of a folder
KINDS = ('mean', 'class_token', 'patches')
MOST_PATCHES, WINDOW = 4096, 32  # of an image seen at once; a larger one is seen in windows of so many patches a side


class ExistingPath(str):
    """The path of an image file that was found; it is not looked up again."""


class ImageReader:
    """Reads images from any source and prepares them with the built transforms of a pipeline; the first one loads."""

    def __init__(self, transforms: Sequence[Callable[[dict], dict]]):
        scale_decoding(transforms)
        self.loader, *steps = transforms
        # OpenMMLab's loaders give BGR, and errors without a path
        self.loads_rgb = isinstance(self.loader, (LoadImage, LoadBands))
        self.prepare = Compose(steps)
        self.extensions = extensions_of(transforms)

    def sources(self, images: Sources) -> Iterator[ImageInput]:
        return iterate_images(images, self.extensions)

    def load(self, source: ImageInput) -> dict:
        """An image as the pipeline's first transform loads it."""
        if isinstance(source, (str, Path)):
            with nullcontext() if self.loads_rgb else unreadable(str(source), Exception):
                sample = self.loader(dict(img_path=str(source)))
            return with_image(sample, sample['img'])
        if isinstance(self.loader, LoadBands):
            return self.loader(dict(img=np.asarray(source)))
        pixels = rgb_pixels(source)
        return with_image({}, np.ascontiguousarray(pixels if self.loads_rgb else pixels[..., ::-1]))

    def results(
        self,
        images: Sources,
        compute: Callable[[list[dict]], Iterable[dict]],
        batch_size: int = 1,
        on_error: str = 'raise',
        return_images: bool = False,
    ) -> Iterator[dict[str, Any]]:
        """Applies `compute` to images lazily, one batch at a time.

        Args:
            images: a file, a folder (all its images, to any depth, sorted), an array uint8 (H, W, 3), **RGB**, a PIL
                image, or a list of these. For a model of many bands: .tif or .npy files, or arrays (H, W, C).
            compute: gives one dict for each sample of the pipeline.
            batch_size: samples at a time.
            on_error: for an image that cannot be read: 'raise' ends the call, 'skip' yields dict(path, error).
            return_images: also yield `image`, uint8 (H, W, 3), RGB, or bands 1 to 3, see `LoadBands.as_rgb`.

        Yields:
            For each image its dict with `path` added, which is None for an array or PIL image.

        Raises:
            FileNotFoundError: no such file, or a folder without images.
            UnreadableImageError: a file is not an image; the message names it.
        """
        check_choice('on_error', on_error, ('raise', 'skip'))
        sources = self.sources(images)
        while batch := list(islice(sources, batch_size)):
            read = [self._read(source, on_error, return_images) for source in batch]
            samples = [sample for _, sample in read if sample is not None]
            computed = iter(compute(samples) if samples else ())
            for result, sample in read:
                yield result if sample is None else {**next(computed), **result}

    def _read(self, source: ImageInput, on_error: str, return_image: bool) -> tuple[dict[str, Any], dict | None]:
        """The path of a source (and its image) with the prepared sample; or its path and the error with None."""
        result: dict[str, Any] = dict(path=str(source) if isinstance(source, (str, Path)) else None)
        try:
            sample = self.load(source)
            image = sample['img']
            sample = self.prepare(sample)
        except UnreadableImageError as error:
            if on_error == 'raise':
                raise
            return dict(result, error=str(error)), None
        if return_image:
            result['image'] = LoadBands.as_rgb(image if self.loads_rgb else image[..., ::-1])
        return result, sample


def default_layer(depth: int) -> int:
    """The last of the first two thirds of so many blocks, counted from 0."""
    return (2 * depth // 3 - 1) % depth


def rgb_pixels(source: np.ndarray | Image.Image) -> np.ndarray:
    """The pixels, uint8 (H, W, 3), RGB, of an array or a PIL image."""
    if isinstance(source, Image.Image):
        with unreadable(str(getattr(source, 'filename', '') or 'a PIL image'), Exception):
            source.load()  # some formats read their palette or transparency only here
            source = rgb_array(source)
    if source.shape[2:] != (3,) or source.dtype != np.uint8 or not source.size:
        raise UserError(f'an array of {source.dtype} {source.shape}; expected uint8 (height, width, 3), RGB, not empty')
    return source


def iterate_images(sources: Sources, extensions: Sequence[str] = EXTENSIONS) -> Iterator[ImageInput]:
    """Yields files, arrays and images one by one; folders and lists are expanded, folders by these extensions."""
    if isinstance(sources, (np.ndarray, Image.Image, ExistingPath)):
        yield sources
    elif not isinstance(sources, (str, os.PathLike)):
        for source in sources:
            yield from iterate_images(source, extensions)
    elif os.path.isdir(path := os.path.expanduser(sources)):
        check_images_alone(Path(path))
        names = list_images(path, extensions)
        if not names:
            raise FileNotFoundError(f'no images in {str(sources)!r}')
        yield from (ExistingPath(Path(path, name)) for name in names)
    elif os.path.lexists(path):  # a link that leads nowhere fails when it is read
        yield ExistingPath(Path(path))
    else:
        hint = f'; if results go there, type --out {quoted(path)}' if Path(path).suffix in WRITTEN else ''
        raise FileNotFoundError(f'no file or folder {str(sources)!r}; expected images{hint}')


def usual_preparation(size: Sequence[int], backend: str, geometry: Mapping[str, Any] | None = None) -> list[dict]:
    """The steps after loading if no config gives any, for images of `size` (height, width), see `usual_geometry`."""
    geometry = geometry or usual_geometry(size)
    by = dict(backend=backend, interpolation=geometry['interpolation'])
    resize = dict(type='ResizeEdge', scale=geometry['resize'][0], edge='short', **by)
    if len(geometry['resize']) == 2:
        resize = dict(type='Resize', scale=tuple(geometry['resize'][::-1]), **by)
    crop = dict(type='CenterCrop', crop_size=tuple(geometry['crop'][::-1]))
    if geometry['rounds_down']:
        crop['type'] = 'beit_mm.CenterCropDown'
    return [resize, crop, dict(type='PackInputs')]


class FeatureExtractor:
    """Computes the hidden states of a BEiT for unmasked images, without the final norm.

    Args:
        checkpoint: path, URL or name in `list_models` of a BEiT in any format, of any task; or a BEiTBackbone.
        device: such as 'cuda:1' or 'cpu'; None for a GPU, if there is one. A backbone stays where it is.
        size: side of the prepared image in pixels, or with `whole` its short side; None: as the checkpoint says.
        whole: take all of an image, both sides rounded to multiples of the patch, instead of its middle.
        mean, std: one number for all channels or for each, pixels 0-255; None: the checkpoint's.
        bands: settings of LoadBands, for a model of images other than RGB.
        max_pixels: limit for an image file, see LoadImage; None: its default.

    Attributes:
        mean, std: float (C, 1, 1), of pixels 0-255.
        pipeline: configs of the transforms that prepare an image, which `reader` runs.
    """

    def __init__(
        self,
        checkpoint: CheckpointInput | BEiTBackbone,
        device: Device = None,
        size: int | None = None,
        whole: bool = False,
        mean: PerChannel = None,
        std: PerChannel = None,
        bands: dict | None = None,
        max_pixels: int | None = None,
    ):
        if isinstance(checkpoint, BEiTBackbone):
            self.checkpoint, self.backbone = 'the model', checkpoint
            self.device = next(checkpoint.parameters()).device
            recorded = checkpoint.load_report.preprocessing if checkpoint.load_report else {}
            if [side * checkpoint.patch_size for side in checkpoint.grid] != recorded.get('size'):
                recorded = {**recorded, 'geometry': None}  # it was built for other images than those of the file
            weights = checkpoint.state_dict()
            mean_std, _ = normalisation_of(self.checkpoint, recorded, weights, self.channels, mean=mean, std=std)
        else:
            opened = Checkpoint.open(checkpoint, mean=mean, std=std)
            self.checkpoint = str(opened)
            self.device = torch.device(device or get_device())
            self.backbone_arguments = opened.backbone_arguments()
            self.backbone = BEiTBackbone.from_checkpoint(opened).to(self.device)
            mean_std, _ = opened.normalisation
            recorded = opened.preprocessing
        tensors = torch.tensor([mean_std['mean'], mean_std['std']], dtype=torch.float32, device=self.device)
        self.mean, self.std = tensors[:, :, None, None]
        self.whole = whole
        rgb, patch = self.channels == 3, self.backbone.patch_size
        if size is not None and size < patch:
            raise UserError(f'images of {size} pixels; expected at least one patch, {patch} pixels')
        load: dict = dict(type='beit_mm.LoadImage') if rgb else dict(bands or {}, type='beit_mm.LoadBands')
        if max_pixels is not None:
            load['max_pixels'] = max_pixels
        trained = tuple(side * patch for side in self.backbone.grid)
        if whole:
            resize = dict(type='beit_mm.ResizeToPatches', short_side=size or min(trained), patch_size=patch)
            prepare: list[dict] = [resize, dict(type='PackInputs')]
        else:
            geometry = recorded.get('geometry') if size is None else None
            prepare = usual_preparation((size, size) if size else trained, 'pillow' if rgb else 'cv2', geometry)
        self.pipeline: list[dict] = [load, *prepare]
        with building('mmpretrain'):
            self.reader = ImageReader([TRANSFORMS.build(step) for step in self.pipeline])

    @property
    def channels(self) -> int:
        return self.backbone.patch_embed.proj.in_channels

    def check_whole(self) -> None:
        if self.channels != 3 or not self.whole:
            raise UserError(f'{self.checkpoint}: {self.channels} bands, whole={self.whole}; expected 3 and whole=True')

    def with_random_weights(self, seed: int = 0) -> 'FeatureExtractor':
        """The same extractor with an untrained backbone."""
        twin = copy.copy(self)
        with building(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            twin.backbone = BEiTBackbone(**self.backbone_arguments).to(self.device).eval()
        return twin

    def layer(self, layer: int | None) -> int:
        """The number of a block, from 0; `layer` may count from the end; None: the last in the first two thirds."""
        depth = self.backbone.num_layers
        return default_layer(depth) if layer is None else block_indices(layer, depth)[0]

    def prepared(self, image: ImageInput) -> Tensor:
        """The pixels of an image before normalisation: uint8 or float (C, H, W), 0-255."""
        return self.reader.prepare(self.reader.load(image))['inputs']

    @torch.no_grad()
    def features(self, images: Tensor, layers: Sequence[int | None]) -> dict[str, Tensor]:
        """Outputs of blocks for images (B, C, H, W), pixels 0-255, float32.

        Images of more than MOST_PATCHES patches go through in windows side by side, whose class tokens are averaged.

        Returns dict(class_token=(B, layers, C), mean=(B, layers, C) of the patches, patches=(B, layers, h, w, C)).
        """
        wanted = [self.layer(layer) for layer in layers]
        patch = self.backbone.patch_size
        rows, columns = (side // patch for side in images.shape[2:])
        if rows * columns <= MOST_PATCHES:
            class_token, patches = self.states(images, wanted)
        else:
            height, width = (patch * math.ceil(side / math.ceil(side / WINDOW)) for side in (rows, columns))
            windows = [
                [self.states(window, wanted) for window in strip.split(width, dim=3)]
                for strip in images.split(height, dim=2)
            ]
            class_token = torch.stack([token for strip in windows for token, _ in strip]).mean(dim=0)
            patches = torch.cat([torch.cat([part for _, part in strip], dim=3) for strip in windows], dim=2)
        return dict(class_token=class_token, mean=patches.mean(dim=(2, 3)), patches=patches)

    def states(self, images: Tensor, wanted: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Outputs of the blocks `wanted`: class tokens (B, layers, C) and patches (B, layers, h, w, C), float32."""
        training = self.backbone.training  # a model that was given may be in a training
        self.backbone.eval()
        normalised = (images.to(self.device).float() - self.mean) / self.std
        normalised = normalised.to(self.backbone.cls_token.dtype)  # a backbone that was given may be in half precision
        states = {}
        with inference_autocast(self.device):
            x, grid, shared_bias = self.backbone.embed(normalised, None)  # B, N, C
            for index in range(max(wanted) + 1):
                x = self.backbone.run_blocks(self.backbone.blocks[index : index + 1], x, grid, shared_bias)
                if index in wanted:
                    states[index] = x
        self.backbone.train(training)
        x = torch.stack([states[index] for index in wanted], dim=1).float()  # B, layers, N, C
        return x[:, :, 0], x[:, :, self.backbone.num_prefix_tokens :].unflatten(2, grid)

    def __call__(
        self,
        images: Sources,
        kinds: Sequence[str] = KINDS,
        layers: int | Sequence[int] | None = None,
        batch_size: int = 32,
        on_error: str = 'raise',
        return_images: bool = False,
    ) -> Iterator[dict[str, Any]]:
        """Computes features of images lazily, one batch at a time.

        Args:
            images, batch_size, on_error, return_images: as in ImageReader.results.
            kinds: which to return.
            layers: block, 0-based, negative from the end; None: see `layer`. Several add a first axis to each result.

        Yields:
            For each image dict(path=its file or None, class_token=(C,), mean=(C,) of the patches, patches=(h, w, C)),
            float32; or dict(path, error).
        """
        for kind in kinds:
            check_choice('kind', kind, KINDS)
        several = np.ndim(layers) > 0
        blocks = layers if several else [layers]

        def compute(samples: list[dict]) -> Iterator[dict[str, Any]]:
            inputs = [sample['inputs'] for sample in samples]
            one_shape = len({image.shape for image in inputs}) == 1
            for batch in [torch.stack(inputs)] if one_shape else [image[None] for image in inputs]:
                features = self.features(batch, blocks)
                arrays = {kind: features[kind].cpu().numpy() for kind in kinds}
                for row in range(len(batch)):
                    yield {kind: values[row] if several else values[row, 0] for kind, values in arrays.items()}

        return self.reader.results(images, compute, batch_size, on_error, return_images)

    def means(self, images: Sequence[ImageInput]) -> tuple[Tensor, list[dict[str, Any]]]:
        """Default features float32 (N, C) of the readable images, and dict(path[, error]) of each image."""
        samples, features = gathered(self(images, ['mean'], on_error='skip'), 'mean', len(images))
        return torch.from_numpy(np.reshape(features, (-1, self.backbone.embed_dims)).astype('float32')), samples


def gathered(results: Iterable[dict[str, Any]], kind: str, number: int) -> tuple[list[dict[str, Any]], Any]:
    """The other values of at most `number` results, and their features: one array, of 'patches' a list.

    Kept one by one, small arrays would hold on to the memory around them, which each batch needs.
    """
    others: list[dict[str, Any]] = []
    features: Any = []
    read = 0
    for result in results:
        others.append(result)
        if 'error' in result:
            continue
        found = result.pop(kind)
        if kind == 'patches':
            features.append(found)
            continue
        if not read:
            features = np.empty((number, *found.shape), found.dtype)
        features[read] = found
        read += 1
    return others, features[:read] if read else features


def embed(
    checkpoint: CheckpointInput,
    images: Sources = PHOTOS,
    out: str | Path | None = None,
    kind: str = 'mean',
    layer: int | None = None,
    batch_size: int = 32,
    device: Device = None,
    progress: bool = True,
    on_error: str = 'raise',
    mean: PerChannel = None,
    std: PerChannel = None,
    **options: Any,
) -> dict[str, Any]:
    """Computes features of images, as one array and, if `out` is given, as one file.

    Args:
        checkpoint, images, mean, std: see `classify`.
        device, options: as in FeatureExtractor.
        batch_size, on_error: as in its __call__.
        out: .npz file to write, with `features` and `paths`, see `save_features`.
        kind: 'mean' of the patches, 'class_token', or 'patches'.
        layer: block, counted from 0, or from the end if negative; by default the last in the first two thirds.
        progress: show a bar in a terminal.

    Returns:
        dict(features=float32 (N, C), of 'patches' a list of (h, w, C); paths=list of the files, '' for arrays;
        skipped=list of dict(path, error); checkpoint, kind, layer).
    """
    if out is not None and Path(out).suffix != '.npz':
        raise UserError(f'{str(out)!r}: features are written to files ending in .npz')
    extractor = FeatureExtractor(checkpoint, device, mean=mean, std=std, **options)
    sources = list(extractor.reader.sources(images))
    computed = extractor(sources, [kind], layer, batch_size, on_error)
    results, features = gathered(with_bar(computed, len(sources)) if progress else computed, kind, len(sources))
    if not len(features):
        reason = results[0]['error'] if results else 'the list is empty'
        raise FileNotFoundError(f'none of {len(results)} images could be read: {reason}')
    found = dict(
        features=features,
        paths=[result['path'] or '' for result in results if 'error' not in result],
        skipped=[result for result in results if 'error' in result],
        checkpoint=str(checkpoint),
        kind=kind,
        layer=extractor.layer(layer),
    )
    if out is not None:
        save_features(found, Path(out).expanduser())
    return found


def save_features(found: dict[str, Any], out: str | Path) -> None:
    """Writes what `embed` returns, without `skipped`, to an .npz file.

    The patches of all images are concatenated, (sum of h * w, C); `grids` holds each (h, w).
    """
    arrays = {name: np.array(found[name]) for name in ('checkpoint', 'kind', 'layer')}
    features = found['features']
    if found['kind'] == 'patches':
        arrays['grids'] = np.array([maps.shape[:2] for maps in features])
        features = np.concatenate([maps.reshape(-1, maps.shape[2]) for maps in features])
    with atomic_file(out) as file:
        np.savez(file, features=features, paths=np.array(found['paths'], dtype=np.str_), **arrays)

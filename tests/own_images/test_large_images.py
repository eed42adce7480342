"""Images that are segmented in blocks, georeferences and maps of confidence, through the verb."""

from pathlib import Path

import numpy as np
import pytest
import rasterio
import torch
from affine import Affine
from narrow_segmentors import CLASSES, CROP, SEGMENTOR, narrow_segmentor
from PIL import Image
from rasterio.windows import Window

from beit_mm import __main__ as command
from beit_mm.apis.inferencers import SegmentationInferencer
from beit_mm.datasets.reading import UnreadableImageError
from beit_mm.engine.checkpoints import plain_values
from beit_mm.own_images.prediction import segment
from beit_mm.segmentation.segmentor import SlidingSegmentor

HEIGHT, WIDTH = 310, 420
PLACE = dict(crs='EPSG:32633', transform=Affine(0.5, 0, 400_000, 0, -0.5, 5_000_000))


def save_segmentor(file: Path, short_side: int = HEIGHT, bands: int = 3) -> Path:
    """A checkpoint of random weights that sees images at a short side, and whose classes all win somewhere."""
    load = dict(type='beit_mm.LoadImage') if bands == 3 else dict(type='beit_mm.LoadBands', low=0.0, high=2000.0)
    resize = dict(type='Resize', scale=(4096, short_side), keep_ratio=True)
    dataset = dict(pipeline=[load, resize, dict(type='PackSegInputs')])
    model = narrow_segmentor('bias')
    settings = dict(default_scope='mmseg', model=SEGMENTOR, test_dataloader=dict(dataset=dataset))
    with torch.no_grad():
        logits = model(torch.randn(1, 3, CROP, CROP, generator=torch.Generator().manual_seed(0)))
        model.decode_head.conv_seg.bias -= logits.mean(dim=(0, 2, 3))
    torch.save(dict(state_dict=model.state_dict(), meta=dict(config_dict=plain_values(settings))), file)
    return file


def smooth_pixels(height: int = HEIGHT, width: int = WIDTH) -> np.ndarray:
    coarse = np.random.default_rng(0).integers(0, 256, (height // 12, width // 12, 3), dtype=np.uint8)
    return np.asarray(Image.fromarray(coarse).resize((width, height), Image.BICUBIC))


def save_tiff(file: Path, pixels: np.ndarray, **options: object) -> Path:
    height, width, bands = pixels.shape
    options = dict(options, dtype=pixels.dtype, tiled=True, blockxsize=64, blockysize=64)
    with rasterio.open(file, 'w', 'GTiff', width, height, bands, **options) as tiff:
        tiff.write(pixels.transpose(2, 0, 1))
    return file


@pytest.fixture
def in_blocks(monkeypatch):
    """Calling it lowers the limit of memory; it returns the list of sizes that the network then gets."""

    def lower() -> list[tuple[int, int]]:
        for module in ('segmentor', 'blocks'):
            monkeypatch.setattr(f'beit_mm.segmentation.{module}.MAX_LOGITS', CLASSES * 160**2)
        sizes, infer = [], SlidingSegmentor.inference
        monkeypatch.setattr(
            SlidingSegmentor, 'inference', lambda self, x, *args: (sizes.append(tuple(x.shape[2:])), infer(self, x))[1]
        )
        return sizes

    return lower


@pytest.mark.parametrize('short_side', [HEIGHT, 233, 457])
@pytest.mark.parametrize('source', ['array', 'tiff'])
def test_blocks_have_the_labels_of_the_whole_image(tmp_path, in_blocks, source, short_side):
    """Also of an image that the network sees smaller or larger; a TIFF is never decoded whole."""
    pixels = smooth_pixels()
    segmentor = SegmentationInferencer(save_segmentor(tmp_path / 'model.pth', short_side), 'cpu')
    (whole,) = segmentor(pixels)
    image = pixels if source == 'array' else save_tiff(tmp_path / 'image.tif', pixels)
    segmentor.reader.loader.max_pixels = HEIGHT * WIDTH - 1
    sizes = in_blocks()
    (found,) = segmentor(image)
    assert len(sizes) > 3 and max(map(max, sizes)) <= 200
    assert len(np.unique(whole['labels'])) == CLASSES and found['labels'].dtype == np.uint8
    equal = found['labels'] == whole['labels']
    assert equal.all() if short_side == HEIGHT else equal.mean() > (0.999 if source == 'array' else 0.99)
    assert abs(found['confidence'] - whole['confidence'])[equal].max() < (1e-3 if source == 'array' else 0.05)

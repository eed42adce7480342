"""Images that are segmented in blocks, georeferences and maps of confidence, through the verb."""

from pathlib import Path

import numpy as np
import pytest
import rasterio
import torch
from affine import Affine
from narrow_segmentors import CLASSES, CROP, SEGMENTOR, narrow_segmentor
from PIL import Image

from beit_mm import __main__ as command
from beit_mm.apis.inferencers import SegmentationInferencer
from beit_mm.datasets.reading import UnreadableImageError
from beit_mm.engine.checkpoints import plain_values
from beit_mm.own_images.prediction import segment
from beit_mm.segmentation.segmentor import SlidingSegmentor

pytestmark = pytest.mark.long

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
            monkeypatch.setattr(f'beit_mm.segmentation.{module}.MAX_LOGITS', 16 * 130**2)
        sizes, infer = [], SlidingSegmentor.inference
        monkeypatch.setattr(
            SlidingSegmentor, 'inference', lambda self, x, *args: (sizes.append(tuple(x.shape[2:])), infer(self, x))[1]
        )
        return sizes

    return lower


@pytest.mark.parametrize('short_side', [HEIGHT, 233, 342])
def test_blocks_have_the_labels_of_the_whole_image(tmp_path, in_blocks, short_side):
    """Also of an image that the network sees smaller or larger; a TIFF is never decoded whole."""
    pixels = smooth_pixels()
    segmentor = SegmentationInferencer(save_segmentor(tmp_path / 'model.pth', short_side), 'cpu')
    segmentor.with_probabilities = True
    (whole,) = segmentor(pixels)
    assert len(np.unique(whole['labels'])) == CLASSES
    segmentor.reader.loader.max_pixels = HEIGHT * WIDTH - 1
    sizes = in_blocks()
    # GDAL resizes a window a little differently
    for image, least, most in ((pixels, 0.999, 1e-3), (save_tiff(tmp_path / 'image.tif', pixels), 0.99, 0.05)):
        sizes.clear()
        (found,) = segmentor(image)
        assert len(sizes) > 3 and max(map(max, sizes)) <= 200 and found['labels'].dtype == np.uint8
        equal = found['labels'] == whole['labels']
        assert equal.all() if short_side == HEIGHT else equal.mean() > least
        for kind in ('confidence', 'probabilities'):
            assert abs(found[kind] - whole[kind])[..., equal].max() < most


@pytest.mark.parametrize('size', ['whole', 'in blocks'])
def test_maps_of_a_geotiff_lie_on_its_grid(tmp_path, in_blocks, size):
    """255 and confidence 0 where it has no data, which is not counted in the mean; read back by rasterio."""
    pixels = smooth_pixels()
    (plain,) = SegmentationInferencer(save_segmentor(tmp_path / 'model.pth'), 'cpu')(pixels)
    pixels = np.where(np.arange(WIDTH)[:, None] < 40, 0, np.maximum(pixels, 1)).astype(np.uint8)  # 0 marks missing data
    file = save_tiff(tmp_path / 'mosaic.tif', pixels, **PLACE, nodata=0)
    words = ['segment', tmp_path / 'model.pth', file, '--out', tmp_path / 'out', '--confidence', '--probabilities']
    if size == 'in blocks':
        in_blocks()
        words += ['--max-pixels', HEIGHT * WIDTH - 1]
    command.main([*map(str, words)])
    with rasterio.open(tmp_path / 'out/labels/mosaic.tif') as labels:
        values = labels.read(1)
        assert labels.crs == PLACE['crs'] and labels.transform == PLACE['transform'] and labels.nodata == 255
        assert labels.dtypes == ('uint8',) and len({labels.colormap(1)[n] for n in range(CLASSES)}) == CLASSES
        assert labels.compression.value == 'DEFLATE' and labels.block_shapes == [(512, 512)]
        assert (labels.dataset_mask()[:, :40] == 0).all() and labels.dataset_mask()[:, 40:].all()
    with rasterio.open(tmp_path / 'out/confidence/mosaic.tif') as confidence:
        assert confidence.crs == PLACE['crs'] and confidence.transform == PLACE['transform']
        assert confidence.nodata == 0 and confidence.scales == (1 / 255,)
        shares = confidence.read(1) / 255
    assert (values[:, :40] == 255).all() and not shares[:, :40].any()
    probabilities = np.load(tmp_path / 'out/probabilities/mosaic.npz')['probabilities']
    assert not probabilities[..., :40].any() and abs(probabilities.max(axis=0) - shares).max() < 0.5 / 255 + 1e-3
    assert (probabilities.argmax(axis=0) == values)[:, 40:].mean() > 0.99
    far = np.s_[:, 40 + CROP :]  # windows without a pixel of the border
    assert (values == plain['labels'])[far].mean() > 0.99
    assert abs(shares - plain['confidence'])[far].max() < 0.06
    row = (tmp_path / 'out/confidence.csv').read_text(encoding='utf-8-sig').splitlines()[1].replace('"', '').split(',')
    assert row[1] == 'labels/mosaic.tif' and float(row[2]) == pytest.approx(shares[:, 40:].mean(), abs=2e-3)
    assert np.array_equal(np.asarray(Image.open(tmp_path / 'out/labels/mosaic.tif')), values)


def test_world_files_are_copied_beside_maps_of_any_number_of_images(tmp_path):
    """Their confidence too, in 8 bits; a photo without one stays alone."""
    photos = tmp_path / 'photos'
    photos.mkdir()
    for name in ('a.jpg', 'b.JPG', 'c.png'):
        Image.fromarray(smooth_pixels(60, 80)).save(photos / name)
    for name in ('a.jgw', 'b.WLD'):
        (photos / name).write_text(f'{name}\n')
    model = save_segmentor(tmp_path / 'model.pth')
    found = segment(model, photos, tmp_path / 'out', confidence=True)
    for result, plain in zip(found, SegmentationInferencer(model, 'cpu')(photos), strict=True):
        shares = np.asarray(Image.open(result['confidence_map'])) / 255
        assert abs(shares - plain['confidence']).max() < 0.5 / 255 + 1e-6
    for kind in ('labels', 'confidence'):
        worlds = {path.name: path.read_text() for path in (tmp_path / 'out' / kind).glob('*.pgw')}
        assert worlds == {'a.pgw': 'a.jgw\n', 'b.pgw': 'b.WLD\n'}


def test_bands_are_read_in_windows_and_empty_blocks_are_skipped(tmp_path, in_blocks):
    pixels = smooth_pixels().astype(np.uint16) * 7 + 1
    pixels[:, :220] = 65535
    file = save_tiff(tmp_path / 'bands.tiff', pixels, **PLACE, nodata=65535)
    checkpoint = torch.load(save_segmentor(tmp_path / 'model.pth'), weights_only=False)
    pipeline = checkpoint['meta']['config_dict']['test_dataloader']['dataset']['pipeline']
    pipeline[0] = dict(type='beit_mm.LoadBands', low=[0.0] * 3, high=[2000.0] * 3, max_pixels=HEIGHT * WIDTH)
    torch.save(checkpoint, tmp_path / 'model.pth')
    (whole,) = SegmentationInferencer(tmp_path / 'model.pth', 'cpu')(file)
    sizes = in_blocks()
    segmentor = SegmentationInferencer(tmp_path / 'model.pth', 'cpu', max_pixels=HEIGHT * WIDTH - 1)
    (found,) = segmentor(file, return_images=True)
    seen = found['confidence'] > 0
    assert 0.5 < seen.mean() < 0.9 and seen[:, 220:].all() and len(sizes) > 3
    assert (found['labels'] == whole['labels'])[seen].all() and found['image'].shape == (HEIGHT, WIDTH, 3)


@pytest.mark.parametrize('fault', ['truncated', 'another format', 'sixteen bits'])
def test_a_large_tiff_that_cannot_be_read_is_named(tmp_path, fault):
    """GDAL must not be led to other files, and pixels must not be read in another way than by Pillow."""
    file, secret = tmp_path / 'image.tif', save_tiff(tmp_path / 'secret.tif', smooth_pixels())
    if fault == 'another format':
        band = f'<VRTRasterBand band="1"><SimpleSource><SourceFilename>{secret}</SourceFilename></SimpleSource>'
        dataset = f'<VRTDataset rasterXSize="{WIDTH}" rasterYSize="{HEIGHT}">{band}</VRTRasterBand></VRTDataset>'
        file.write_text(dataset)
    elif fault == 'truncated':
        file.write_bytes(save_tiff(tmp_path / 'whole.tif', smooth_pixels(), compress='lzw').read_bytes()[:-50_000])
    else:
        save_tiff(file, smooth_pixels().astype(np.uint16))
    segmentor = SegmentationInferencer(save_segmentor(tmp_path / 'model.pth'), 'cpu', max_pixels=10_000)
    with pytest.raises(UnreadableImageError, match='image.tif'):
        [*segmentor(file)]
    (found,) = segmentor(file, on_error='skip')
    assert {*found} == {'path', 'error'}


def test_without_rasterio_a_line_says_what_is_lost(tmp_path, monkeypatch, warnings):
    file = save_tiff(tmp_path / 'place.tif', smooth_pixels(60, 80), **PLACE)
    monkeypatch.setattr('beit_mm.datasets.geotiff.rasterio', None)
    (found,) = segment(save_segmentor(tmp_path / 'model.pth'), file, tmp_path / 'out')
    assert found['labels'].endswith('place.png') and 'beit_mm[geo]' in ' '.join(warnings())


def test_unsure_pixels_and_overlays_of_large_images(tmp_path, monkeypatch):
    """The overlay is reduced, the label map is not."""
    monkeypatch.setattr('beit_mm.apis.inferencers.MAX_SIDE', 200)
    pixels = smooth_pixels()
    (plain,) = SegmentationInferencer(save_segmentor(tmp_path / 'model.pth'), 'cpu')(pixels)
    least = float(np.median(plain['confidence']))
    file = save_tiff(tmp_path / 'image.tif', pixels, **PLACE)
    (found,) = segment(tmp_path / 'model.pth', file, tmp_path / 'out', min_confidence=least)
    labels = np.asarray(Image.open(found['labels']))
    assert (labels == np.where(plain['confidence'] >= least, plain['labels'], 255)).mean() > 0.99
    assert found['labelled'] == pytest.approx(0.5, abs=0.01) and labels.shape == (HEIGHT, WIDTH)
    overlay = np.asarray(Image.open(found['overlay']))
    assert 104 < overlay.shape[0] < 200 and overlay.shape[1] >= 140
    background = np.asarray(Image.fromarray(pixels).reduce(3))
    unsure = labels[::3, ::3] == 255
    assert (overlay[:104, :140][unsure] == background[unsure]).all()

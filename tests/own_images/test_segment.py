"""The segmentation inferencer: from a checkpoint alone, the labels of tools/test.py; predictions saved by a test."""

import csv
import json
import os
import shutil
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from helpers import ROOT, run_tool
from label_maps import CLASSES as CLASSES_OF_MAPS
from label_maps import make_label_maps, options
from labelled import save_backbone
from mmcv.transforms import Resize
from mmengine.config import Config
from mmengine.dataset import pseudo_collate
from narrow_segmentors import CROP, SEGMENTOR, narrow_segmentor
from PIL import Image

from beit_mm import __main__ as command
from beit_mm.apis import inference
from beit_mm.apis.export import describe_use
from beit_mm.apis.inferencers import SegmentationInferencer
from beit_mm.datasets.segmentation_folder import SegmentationFolder
from beit_mm.engine.checkpoints import plain_values
from beit_mm.own_images.images import write_lists
from beit_mm.own_images.label_maps import find_label_maps
from beit_mm.own_images.prediction import segment

CLASSES = ('sky', 'road', 'car', 'tree', 'sign')
SIZES = {'a/small.png': (33, 47), 'a/wide.png': (40, 170), 'square.png': (64, 64)}
LOAD, LOAD_LABELS = dict(type='beit_mm.LoadImage'), dict(type='beit_mm.LoadAnnotation')


@pytest.fixture(scope='module')
def work(tmp_path_factory) -> Path:
    """images/, annotations/, config.py and model.pth, which holds its config and the dataset's classes."""
    folder = tmp_path_factory.mktemp('segmentation')
    rng = np.random.default_rng(0)
    for name, (height, width) in SIZES.items():
        image = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8)).resize((width, height))
        labels = Image.fromarray(rng.integers(0, len(CLASSES) + 1, (height, width), dtype=np.uint8))
        for kind, saved in (('images', image), ('annotations', labels)):
            (folder / kind / name).parent.mkdir(parents=True, exist_ok=True)
            saved.save(folder / kind / name)
    (folder / 'classes.txt').write_text('\n'.join(CLASSES) + '\n')
    resize = dict(type='Resize', scale=(2048, CROP), keep_ratio=True)
    dataset = dict(
        options(folder, ''),
        type='beit_mm.SegmentationFolder',
        data_prefix=dict(img_path='images', seg_map_path='annotations'),
        pipeline=[LOAD, resize, LOAD_LABELS, dict(type='PackSegInputs')],
        test_mode=True,
    )
    views = dict(type='beit_mm.MultiScaleViews', short_side=CROP, crop_size=(CROP, CROP), ratios=(1.0, 1.25))
    sampler = dict(type='beit_mm.SeededSampler', shuffle=False)
    settings = dict(
        default_scope='mmseg',
        model=SEGMENTOR,
        test_dataloader=dict(batch_size=1, num_workers=0, sampler=sampler, dataset=dataset),
        test_evaluator=dict(type='IoUMetric'),
        test_cfg=dict(type='TestLoop'),
        tta_model=dict(type='beit_mm.MultiScaleTTA'),
        tta_pipeline=[LOAD, LOAD_LABELS, views],
    )
    Config(settings).dump(folder / 'config.py')
    palette = [[40 * i, 255 - 40 * i, 90] for i in range(len(CLASSES))]
    meta = dict(config_dict=plain_values(settings), dataset_meta=dict(classes=CLASSES, palette=palette))
    model = narrow_segmentor('bias')
    with torch.no_grad():  # every class wins somewhere
        logits = model(torch.randn(1, 3, CROP, CROP, generator=torch.Generator().manual_seed(0)))
        model.decode_head.conv_seg.bias -= logits.mean(dim=(0, 2, 3))
    torch.save(dict(state_dict=model.state_dict(), meta=meta), folder / 'model.pth')
    return folder


@pytest.mark.parametrize('scales', ['one', 'all'])
def test_labels_are_those_of_the_test_tool(work, scales, monkeypatch):
    monkeypatch.chdir(work)
    words = ['--work-dir', scales, '--out', f'{scales}.json', *['--tta'] * (scales == 'all')]
    evaluator = f'test_evaluator.output_dir={scales}/labels'
    run_tool('test.py', 'config.py', 'model.pth', *words, '--cfg-options', evaluator)
    assert 0 < json.loads((work / f'{scales}.json').read_text())['mIoU'] < 100
    segmenter = SegmentationInferencer('model.pth', device='cpu', multi_scale=scales == 'all')
    assert segmenter.classes == CLASSES
    found = {os.path.relpath(result['path'], 'images'): result['labels'] for result in segmenter('images')}
    assert sorted(found) == sorted(SIZES) and len(np.unique(np.concatenate([*map(np.ravel, found.values())]))) > 1
    for file, labels in found.items():
        assert labels.dtype == np.uint8 and labels.shape == SIZES[file]
        saved = np.asarray(Image.open(f'{scales}/labels/{Path(file).stem}.png'))
        assert (saved == labels + 1).all()  # ADE20K's numbers


def test_a_given_config_may_name_mmsegs_own_segmentor_and_stays_as_it_is(work):
    """Its windows give the same logits: labels differ where two classes are close."""
    config = Config.fromfile(work / 'config.py')
    config.model.type = 'EncoderDecoder'
    before = config.to_dict()
    sources = [work / 'images/square.png', work / 'images/a/wide.png']
    ours = SegmentationInferencer(work / 'model.pth', 'cpu')
    theirs = SegmentationInferencer(work / 'model.pth', 'cpu', config, max_pixels=10_000)
    for found, expected in zip(theirs(sources), ours(sources), strict=True):
        assert (found['labels'] == expected['labels']).mean() > 0.95
    assert theirs.reader.loader.max_pixels == 10_000 and config.to_dict() == before


@pytest.mark.parametrize('is_large', [False, True])
def test_the_verb_writes_label_maps_and_overlays(work, tmp_path, capsys, monkeypatch, is_large):
    """Files of one name do not overwrite each other."""
    if is_large:  # the first image has 33 x 47 pixels
        monkeypatch.setattr(inference, 'MANY_BYTES', 5 * len(CLASSES) * 33 * 47 * 2 - 1)
    (tmp_path / 'more').mkdir()
    for name in ('square.png', 'square_2.png'):
        Image.new('RGB', (20, 30), (10, 200, 30)).save(tmp_path / 'more' / name)
    results = segment(work / 'model.pth', [work / 'images', tmp_path / 'more'], tmp_path / 'out', probabilities=True)
    assert ('probabilities will take' in capsys.readouterr().out) == is_large
    assert len({result['labels'] for result in results}) == len(SIZES) + 2
    segmentor = SegmentationInferencer(work / 'model.pth')
    expected = [result['labels'] for result in segmentor(work / 'images')]
    for result, labels in zip(results, expected, strict=False):
        file = np.load(result['probabilities'])
        assert file['probabilities'].dtype == np.float16 and [*file['classes']] == [*CLASSES]
        shares = file['probabilities'].astype(float)
        of_label = np.take_along_axis(shares, labels[None].astype(int), axis=0)
        assert abs(of_label - shares.max(axis=0)).max() < 1e-3 and abs(shares.sum(axis=0) - 1).max() < 5e-3
        with Image.open(result['labels']) as saved:
            assert (np.asarray(saved) == labels).all() and saved.mode == 'P'
            colours = {tuple(colour) for colour in np.asarray(saved.convert('RGB')).reshape(-1, 3)}
        drawn = np.asarray(Image.open(result['overlay'])).astype(int)
        legend = {tuple(colour) for colour in drawn[labels.shape[0] :].reshape(-1, 3)}
        assert drawn.shape[1] >= labels.shape[1] and len(colours) == len(np.unique(labels)) and colours <= legend
        squares = [tuple(colour) for colour in drawn[labels.shape[0] :].reshape(-1, 3) if tuple(colour) in colours]
        assert squares[0] == tuple(segmentor.palette[np.bincount(labels.ravel()).argmax()])  # the most frequent class
    assert (tmp_path / 'out/classes.txt').read_text().split() == list(CLASSES)


@pytest.mark.parametrize('theirs', ['labels/square.png', 'classes.txt'])
def test_label_maps_and_names_of_the_users_are_not_overwritten(work, tmp_path, theirs):
    """A folder of data as --out; what an interrupted call has left is written again."""
    out, image = tmp_path / 'data', work / 'images/square.png'
    (out / theirs).parent.mkdir(parents=True)
    (out / theirs).write_bytes(b'precious')
    with pytest.raises(ValueError, match=f'{theirs.split("/")[0]} is there already.*--out'):
        segment(work / 'model.pth', image, out)
    assert [path for path in out.rglob('*') if path.is_file()] == [out / theirs]
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(SegmentationInferencer, 'predict', Mock(side_effect=KeyboardInterrupt))
        segment(work / 'model.pth', image, tmp_path / 'out')
    assert len(segment(work / 'model.pth', image, tmp_path / 'out')) == 1


@pytest.mark.parametrize('scale', [(64, 64), 64, (60, 90)])
def test_where_the_long_side_decides_images_are_seen_as_in_the_config(work, scale, tmp_path, monkeypatch):
    """By an ONNX file too; the options for the scale still hold."""
    monkeypatch.syspath_prepend(ROOT / 'tools')
    from onnx_predict import prepare

    content = torch.load(work / 'model.pth', weights_only=False)
    content['meta']['config_dict']['test_dataloader']['dataset']['pipeline'][1]['scale'] = scale
    torch.save(content, tmp_path / 'model.pth')
    segmentor = SegmentationInferencer(tmp_path / 'model.pth', 'cpu')
    steps = json.loads(json.dumps(describe_use(segmentor)['steps']))
    for height, width in ((40, 170), (100, 80), (64, 64), (300, 150)):
        pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
        expected = Resize(scale, keep_ratio=True)(dict(img=pixels))['img']
        seen = segmentor.reader.prepare(segmentor.reader.load(pixels))['inputs'].permute(1, 2, 0).numpy()
        assert np.array_equal(seen, expected) and np.array_equal(prepare(pixels, steps), expected)
    for arguments, size in ((dict(short_side=75), (75, 150)), (dict(full_size=True), (150, 300))):
        reader = SegmentationInferencer(tmp_path / 'model.pth', 'cpu', **arguments).reader
        assert reader.prepare(reader.load(np.zeros((150, 300, 3), np.uint8)))['inputs'].shape[1:] == size


def test_pixels_that_are_not_sure_are_ignored_in_a_folder_that_finetune_reads(work, tmp_path, capsys):
    """Beside the probabilities of mmseg's logits; the maps are read back by the dataset that a training has."""
    (tmp_path / 'gone.png').symlink_to('nowhere')
    sources, out = [work / 'images', work / 'images/square.png', tmp_path / 'gone.png'], tmp_path / 'out'
    segmentor = SegmentationInferencer(work / 'model.pth', 'cpu')
    truth = {}
    for file in SIZES:
        sample = segmentor.reader.prepare(segmentor.reader.load(work / 'images' / file))
        with torch.no_grad():
            (found,) = segmentor.model.test_step(pseudo_collate([sample]))
        truth[file] = [each.numpy() for each in found.seg_logits.data.softmax(dim=0).max(dim=0)]
    values = np.concatenate([probability.ravel() for probability, _ in truth.values()])
    least = float(np.median(values))

    words = ['segment', work / 'model.pth', *sources, '--out', out, '--min-confidence']
    command.main([*map(str, words), '1'])
    assert ' 0 % of the pixels' in capsys.readouterr().out.replace('\n', ' ')
    with pytest.raises(ValueError, match='expected a number from 0 to 1'):
        command.main([*map(str, words), '90'])
    # what was not sure enough is not in the way
    command.main([*map(str, words), str(least), '--json', str(tmp_path / 'found.json')])
    shares = [float((truth[file][0] >= least).mean()) for file in (*SIZES, 'square.png')]
    assert f'{100 * np.mean(shares):.0f} % of the pixels' in capsys.readouterr().out
    with (out / 'confidence.csv').open(encoding='utf-8-sig') as file:
        rows = [*csv.DictReader(file)]
    assert [row['labels'] for row in rows[:-1]] == [f'labels/{n}.png' for n in ('small', 'wide', 'square', 'square_2')]
    found = json.loads((tmp_path / 'found.json').read_text())
    assert [(each['path'], each.get('error', '')) for each in found] == [(row['path'], row['error']) for row in rows]
    assert rows[-1]['labels'] == rows[-1]['confidence'] == '' != rows[-1]['error'] and len(rows) == 5
    for row in rows[:-1]:
        probability, labels = truth[os.path.relpath(row['path'], work / 'images')]
        assert float(row['confidence']) == pytest.approx(probability.mean(), abs=6e-4)
        saved = np.asarray(Image.open(out / row['labels']))
        clear = abs(probability - least) > 1e-5
        assert (saved == np.where(probability >= least, labels, 255))[clear].all() and clear.mean() > 0.99
        assert (out / 'images' / Path(row['labels']).name).resolve() == Path(row['path']).resolve()
        drawn = np.asarray(Image.open(out / 'overlays' / Path(row['labels']).name))[: len(saved)]
        image = np.asarray(Image.open(row['path']))
        assert (drawn[:, : image.shape[1]][saved == 255] == image[saved == 255]).all()

    found = find_label_maps(out, whole=True)
    write_lists(found, tmp_path / 'lists')
    dataset = SegmentationFolder(**found.dataset(tmp_path / 'lists', 'train'), pipeline=[LOAD, LOAD_LABELS])
    assert found.classes == [*CLASSES] and len(dataset) == 4
    for sample in dataset:
        saved = np.asarray(Image.open(out / 'labels' / Path(sample['img_path']).name))
        assert (sample['gt_seg_map'] == saved).all()
    with pytest.raises(ValueError, match='is there already'):  # what it holds would be learned from too
        segment(work / 'model.pth', sources, out, min_confidence=0.1)


def test_a_model_without_classes_segments_by_labelled_patches(tmp_path):
    """Random weights tell colours apart too."""
    pretrained, data = save_backbone(tmp_path / 'ours.pth'), make_label_maps(tmp_path / 'data')
    found = segment(pretrained, data / 'images/validation', tmp_path / 'maps', data, short_side=40, probabilities=True)
    for number, result in enumerate(found):
        assert np.load(result['probabilities'])['probabilities'].shape == (3, 40, 56)
        annotation = data / f'annotations/validation/{number}.png'
        labels, truth = (np.array(Image.open(path)).astype(int) for path in (result['labels'], annotation))
        assert (labels == truth - 1)[truth > 0].mean() > 0.75
    assert len(found) == 4
    # a class is sure where the nearest patches all have it: there fewer pixels are wrong
    (sure, *_) = segment(
        pretrained,
        data / 'images/validation/0.png',
        tmp_path / 'sure',
        labelled=data,
        short_side=40,
        min_confidence=0.9,
    )
    annotation, kept, every = (
        np.asarray(Image.open(file)).astype(int)
        for file in (data / 'annotations/validation/0.png', sure['labels'], found[0]['labels'])
    )
    assert ((kept == every) | (kept == 255)).all() and 0.1 < sure['labelled'] == (kept < 255).mean() < 0.9
    known = (annotation > 0) & (kept < 255)
    assert (kept == annotation - 1)[known].mean() > (every == annotation - 1)[annotation > 0].mean()
    assert found[0]['confidence'] == pytest.approx(sure['confidence']) and 0.5 < sure['confidence'] < 1
    assert (tmp_path / 'maps/classes.txt').read_text().split() == CLASSES_OF_MAPS
    image = Image.open(data / 'images/validation/0.png')
    arrays = segment(pretrained, [image, np.asarray(image)], tmp_path / 'arrays', labelled=data, short_side=40)
    for array, name in zip(arrays, ('image.png', 'image_2.png'), strict=True):
        assert array['path'] is None and Path(array['labels']).name == Path(array['overlay']).name == name
        assert np.array_equal(np.asarray(Image.open(array['labels'])), every)

    for part in ('images', 'annotations'):  # without training/ and validation/, numbered from 0
        shutil.move(data / part / 'validation', tmp_path / 'flat' / part)
    (tmp_path / 'flat/classes.txt').write_text('\n'.join(['nothing', *CLASSES_OF_MAPS]))
    (again,) = segment(pretrained, tmp_path / 'flat/images/0.png', tmp_path / 'again', labelled=tmp_path / 'flat')
    truth, labels = (np.array(Image.open(path)) for path in (tmp_path / 'flat/annotations/0.png', again['labels']))
    assert (truth == labels).mean() > 0.6


@pytest.mark.parametrize('kind', ['a segmentor', 'labelled patches'])
def test_the_limit_of_pixels_is_the_options_for_images_and_label_maps(work, tmp_path, monkeypatch, kind):
    """Lowered, which costs no memory, at both ends of it: 40 x 56 pixels."""
    data = make_label_maps(tmp_path / 'data')
    words = ['segment', work / 'model.pth', data / 'images/validation', '--out', tmp_path / 'maps']
    if kind == 'labelled patches':
        words[1:2] = [save_backbone(tmp_path / 'ours.pth')]
        words += ['--labelled', data, '--short-side', 40]
    command.main([*map(str, words), '--max-pixels', str(40 * 56)])
    assert len([*(tmp_path / 'maps/labels').iterdir()]) == 4
    expected = pytest.raises(SystemExit) if kind == 'a segmentor' else pytest.raises(ValueError, match='0 images with')
    with expected:
        command.main([*map(str, words), '--max-pixels', str(40 * 56 - 1)])

"""The comparisons of methods, of heads and of what pays with few photos: tables, rows that train, samples."""

import json
import runpy
import shutil
from collections import Counter

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import NO_WORKERS, ROOT, run_tool
from label_maps import make_label_maps
from PIL import Image

from beit_mm.checkpoint.checkpoint import Checkpoint
from beit_mm.datasets.transforms import resize_bicubic
from beit_mm.models.tokenizers.vqkd_training import BEiTTeacher
from beit_mm.registry import TRANSFORMS


@pytest.mark.parametrize(
    ('name', 'record', 'least'),
    [('methods', 'compare-methods', 20), ('heads', 'compare-heads', 5), ('own_photos', 'own-photos', 5)],
)
def test_the_published_tables_are_those_of_the_published_figures(name, record, least, tmp_path, capsys):
    figures, page = (sorted((ROOT / 'docs/records').glob(f'*-{record}.{kind}'))[-1] for kind in ('json', 'md'))
    shutil.copy(figures, tmp_path / 'results.json')
    run_tool(f'dev/compare_{name}.py', tmp_path, '--table', '--out', tmp_path)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith('|')]
    assert len(lines) > least and not set(lines) - set(page.read_text().splitlines())
    assert name != 'methods' or (tmp_path / 'rows.png').stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.parametrize('row', ['pixels', 'dino', 'mae_ours', 'simmim_theirs', 'features_two'])
def test_a_method_trains_without_a_tokenizer(row, images, tmp_path):
    """And what is finished, with its minutes, is not run again; `features_two` has a first stage."""
    for number in range(6):  # a batch has 64 photos
        shutil.copytree(images, tmp_path / f'data/train/{number}')
    words = [tmp_path / 'data', '--rows', row, '--seeds', 0, '--steps', 4, '--stages', 'pretrain', '--out', tmp_path]
    run_tool('dev/compare_methods.py', *words)
    figures = json.loads((tmp_path / 'results.json').read_text())
    run_tool('dev/compare_methods.py', *words)
    assert json.loads((tmp_path / 'results.json').read_text()) == figures
    assert len(figures) == 1 + (row == 'features_two')


@pytest.mark.slow
def test_every_head_trains(tmp_path):
    make_label_maps(tmp_path / 'data', 8, (60, 80))
    (tmp_path / 'data/classes.txt').write_text('\n'.join(map(str, range(11))))
    words = [tmp_path / 'data', '--out', tmp_path / 'out', '--steps', 2, '--seeds', 0, '--rates', 1e-3]
    run_tool('dev/compare_heads.py', *words)
    figures = json.loads((tmp_path / 'out/results.json').read_text())
    assert len(figures) == 8
    # A frozen backbone trains the head alone, low-rank matrices are far fewer than the backbone's million parameters
    assert all(name.endswith('-0-2') for name in figures)  # seed and steps
    trained = {name.partition('-')[0]: figure['trained'] for name, figure in figures.items()}
    assert trained['masks_decoder'] - trained['masks_frozen'] == trained['upernet'] - trained['upernet_frozen'] > 1e6
    assert 0 < trained['upernet_lora'] - trained['upernet_frozen'] < 1e5


def test_photos_are_spread_over_classes_whose_held_out_photos_are_all_there(tmp_path, monkeypatch):
    for label in range(12):
        for part, number in (('train', 10 + label), ('val', 3)):
            folder = tmp_path / f'data/{part}/{label}'
            folder.mkdir(parents=True)
            for index in range(number):
                (folder / f'{index}.jpg').touch()
    monkeypatch.syspath_prepend(ROOT / 'tools/dev')
    sample = runpy.run_path(str(ROOT / 'tools/dev/compare_own_photos.py'))['sample']
    sample(tmp_path / 'data', 40, 0, tmp_path / 'few')
    few = Counter(path.parent.name for path in tmp_path.glob('few/train/*/*'))
    assert len(few) == 4 and {*few.values()} == {10}
    assert Counter(path.parent.name for path in tmp_path.glob('few/val/*/*')) == dict.fromkeys(few, 3)
    sample(tmp_path / 'data', 1000, 0, tmp_path / 'all')
    assert Counter(path.parent.name for path in tmp_path.glob('all/train/*/*')) == {str(i): 10 + i for i in range(12)}


@pytest.mark.slow
def test_the_packaged_backbone_is_taught_what_a_vit_says_of_the_part_that_it_sees(images, tmp_path):
    """Truth: the ViT on the mirror image of a photo, whose left half is the student's crop."""
    views, photo = tmp_path / 'views', images / '03.jpg'
    run_tool('dev/teach_packaged.py', 'look', images, views, '--teacher', 'demo', '--layer', 1)
    run = tmp_path / 'run'
    options = ('--cfg-options', 'train_dataloader.batch_size=4', *NO_WORKERS[:2])
    run_tool('dev/teach_packaged.py', 'train', images, views, '--steps', 2, '--work-dir', run, *options)
    weights = Checkpoint.open(run / 'iter_2.pth').weights
    start = Checkpoint.open('demo').weights
    changed = {name for name, tensor in weights.items() if name in start and not torch.equal(tensor, start[name])}
    assert {'backbone.blocks.0.attn.qkv.weight', 'backbone.blocks.4.mlp.fc2.weight'} <= changed
    crop = TRANSFORMS.build(dict(type='beit_mm.TeacherFeatures', photos=str(images), views=str(views)))
    found = crop(dict(img_path=str(photo), part=(0, 0, 1, 0.5), flip=True))['tokenizer_images']
    seen = np.ascontiguousarray(resize_bicubic(np.array(Image.open(photo)), (8 * 14, 8 * 18))[:, ::-1])
    pixels = torch.from_numpy(seen).permute(2, 0, 1)[None] / 255
    (features,) = BEiTTeacher('demo', 1)(pixels, (14, 18))
    left = features.view(1, 14, 18, -1)[:, :, :9].permute(0, 3, 1, 2)
    expected = F.interpolate(left, (12, 12), mode='bilinear')[0].permute(1, 2, 0)
    expected = (expected - crop.mean) / crop.std
    inside = (slice(1, -1), slice(1, -1))  # at the right edge the view goes on
    torch.testing.assert_close(torch.from_numpy(found[inside]).float(), expected[inside], atol=0.05, rtol=0.02)

"""The drawn images: layout, label maps, the same pictures every time."""

from pathlib import Path

import numpy as np
import pytest
from helpers import run_tool, tree
from PIL import Image
from scenes import OBJECTS, STUFF


def draw(folder: Path, num_train: int = 2) -> Path:
    run_tool('demo/draw_images.py', folder, '--num-train', num_train, '--num-val', 10, '--size', 64)
    return folder


def test_layout_and_labels(tmp_path):
    folder = draw(tmp_path / 'demo', 20)
    classes = (folder / 'meta/classes.txt').read_text().split()
    assert classes == list(OBJECTS) == sorted(OBJECTS)
    assert (folder / 'meta/segmentation_classes.txt').read_text().split() == [*classes, *STUFF]
    images = sorted((folder / 'train').rglob('*.jpg'))
    assert len(images) == 20 and len(list((folder / 'val').rglob('*.jpg'))) == 10
    assert sorted({path.parent.name for path in images}) == classes
    for path in images:
        labels = np.asarray(Image.open(folder / 'annotations' / path.relative_to(folder).with_suffix('.png')))
        image = Image.open(path)
        assert image.size == labels.shape[::-1] and min(image.size) == 64 and np.asarray(image).std() > 10
        assert labels.dtype == np.uint8 and labels.max() <= 13
        assert (labels == classes.index(path.parent.name) + 1).mean() > 0.02  # the object is in the picture


def test_the_same_pictures_whole_data_kept_and_other_data_not_touched(tmp_path):
    (tmp_path / 'demo.partial/train').mkdir(parents=True)
    (tmp_path / 'demo.partial/train/left_over.jpg').write_bytes(b'')  # of a call that was killed
    folder = draw(tmp_path / 'demo')
    assert tree(folder) == tree(draw(tmp_path / 'again')) and not (tmp_path / 'demo.partial').exists()
    made = {path: path.stat().st_mtime_ns for path in folder.rglob('*')}
    draw(folder)
    with pytest.raises(SystemExit, match='error: .*demo is not empty'):
        draw(folder, 3)
    assert made == {path: path.stat().st_mtime_ns for path in folder.rglob('*')}

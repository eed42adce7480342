"""The drawn images: layout, label maps, the same pictures every time."""

from pathlib import Path

import numpy as np
import pytest
from helpers import run_tool, tree
from PIL import Image
from scenes import OBJECTS, STUFF


def draw(folder: Path, num_train: int = 20) -> Path:
    run_tool('demo/draw_images.py', folder, '--num-train', num_train, '--num-val', 2, '--size', 64)
    return folder


def test_layout_labels_and_the_same_pictures_every_time(tmp_path):
    folder = draw(tmp_path / 'demo')
    classes = (folder / 'meta/classes.txt').read_text().split()
    assert classes == list(OBJECTS) == sorted(OBJECTS)
    assert (folder / 'meta/segmentation_classes.txt').read_text().split() == [*classes, *STUFF]
    images = sorted((folder / 'train').rglob('*.jpg'))
    assert len(images) == 20 and sorted({path.parent.name for path in images}) == classes
    for path in images:
        labels = np.asarray(Image.open(folder / 'annotations' / path.relative_to(folder).with_suffix('.png')))
        assert Image.open(path).size == labels.shape[::-1] and labels.dtype == np.uint8 and labels.max() <= 13
        assert (labels == classes.index(path.parent.name) + 1).mean() > 0.02  # the object is in the picture
    assert tree(folder) == tree(draw(tmp_path / 'again'))
    with pytest.raises(SystemExit, match='error: .*demo is not empty'):
        draw(folder, 3)

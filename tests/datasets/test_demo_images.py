"""Demo data: layout, label maps, the same pictures every time."""
import numpy as np
import pytest
from PIL import Image

from beit_mm.datasets.demo_images import make_demo_images
from beit_mm.datasets.demo_scenes import OBJECTS, STUFF


def test_layout_and_labels(tmp_path):
    folder = tmp_path / 'demo'
    make_demo_images(str(folder), num_train=20, num_val=10, size=64)
    classes = (folder / 'meta' / 'classes.txt').read_text().split()
    assert classes == list(OBJECTS) == sorted(OBJECTS) and len(classes) == 10
    assert (folder / 'meta' / 'segmentation_classes.txt').read_text().split() == [*classes, *STUFF]
    assert sorted(path.name for path in (folder / 'train').iterdir()) == classes
    images = sorted((folder / 'train').rglob('*.jpg'))
    assert len(images) == 20 and len(list((folder / 'val').rglob('*.jpg'))) == 10
    for path in images:
        labels = np.asarray(Image.open(
            folder / 'annotations' / path.relative_to(folder).with_suffix('.png')))
        image = Image.open(path)
        assert image.size == labels.shape[::-1] and min(image.size) == 64
        assert labels.dtype == np.uint8 and labels.max() <= 13
        kind = classes.index(path.parent.name) + 1
        assert (labels == kind).mean() > 0.02  # the object is in the picture
        assert np.asarray(image).std() > 10


def test_same_arguments_same_pictures(tmp_path):
    contents = []
    for name in ('a', 'b'):
        folder = make_demo_images(str(tmp_path / name), num_train=5, num_val=2, size=48, seed=3)
        contents.append({path.relative_to(folder): path.read_bytes()
                         for path in (tmp_path / name).rglob('*.jpg')})
    assert contents[0] == contents[1] and len(contents[0]) == 7


def test_complete_data_is_kept_and_other_data_is_not_touched(tmp_path):
    folder = tmp_path / 'demo'
    make_demo_images(str(folder), num_train=2, num_val=1, size=32)
    made = {path: path.stat().st_mtime_ns for path in folder.rglob('*')}
    make_demo_images(str(folder), num_train=2, num_val=1, size=32)
    assert made == {path: path.stat().st_mtime_ns for path in folder.rglob('*')}
    with pytest.raises(FileExistsError, match='demo'):
        make_demo_images(str(folder), num_train=3, num_val=1, size=32)


def test_a_killed_call_leaves_no_half_data_set(tmp_path):
    partial = tmp_path / 'demo.partial' / 'train'
    partial.mkdir(parents=True)
    (partial / 'left_over.jpg').write_bytes(b'')
    folder = make_demo_images(str(tmp_path / 'demo'), num_train=2, num_val=1, size=32)
    assert not (tmp_path / 'demo.partial').exists()
    assert not list((tmp_path / folder).rglob('left_over.jpg'))

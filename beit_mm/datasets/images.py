"""Images without labels: a folder of any shape, or a list of files."""
import os
import re

from mmengine.dataset import BaseDataset

from beit_mm.functional.sample_seed import SampleKey, sample_seed, seed_generators
from beit_mm.registry import DATASETS

from .image_reading import UnreadableImageError

EXTENSIONS = ('.jpg', '.jpeg', '.jfif', '.mpo', '.png', '.apng', '.webp', '.gif', '.bmp', '.ppm',
              '.pgm', '.tif', '.tiff')
SUBSTITUTES = 10  # images tried in place of an unreadable one; if all fail, it is not the images


@DATASETS.register_module()
class UnlabeledImages(BaseDataset):
    """Images for pretraining. What is drawn for a sample depends on its SampleKey only (see
    functional.sample_seed).

    Args:
        data_root: Folder of images, searched to any depth; class folders are not needed and do no
            harm.
        ann_file: List of images, relative to `data_root`: one path a line, relative to
            `data_prefix`, a label after it is ignored. '' takes every image of the folder, in
            sorted order.
        data_prefix: Folder of the images relative to `data_root`, as in mmpretrain, e.g.
            `dict(img_path='train')`.
        on_error: What an unreadable image does: `error` raises, `skip` takes another one in its
            place, always the same one for the same key, and reports the index in `unreadable`. With
            `test_mode=True` it always raises.
        kwargs: As mmengine's BaseDataset: pipeline, indices, test_mode, serialize_data, lazy_init.

    Raises:
        FileNotFoundError: The folder or list is missing or holds no images.
        UnreadableImageError: See `on_error`; under `skip` when 10 substitutes cannot be read
            either.
    """

    def __init__(self, data_root: str = '', ann_file: str = '', data_prefix: str | dict = '',
                 on_error: str = 'error', **kwargs) -> None:
        if on_error not in ('error', 'skip'):
            raise ValueError(f"on_error is {on_error!r}; choose 'error' or 'skip'")
        self.on_error = on_error
        data_prefix = data_prefix if isinstance(data_prefix, dict) else dict(img_path=data_prefix)
        super().__init__(ann_file=ann_file, data_root=data_root, data_prefix=data_prefix, **kwargs)

    def load_data_list(self) -> list[dict]:
        folder = self.data_prefix['img_path']
        if not os.path.isdir(folder):
            raise FileNotFoundError(f'no folder {folder!r}; expected a folder of images')
        paths = list_images(folder) if not self.ann_file else read_list(self.ann_file)
        if not paths:
            raise FileNotFoundError(f'no images in {self.ann_file or folder!r}; '
                                    f'expected files ending in {" ".join(EXTENSIONS)}')
        return [dict(img_path=os.path.join(folder, path)) for path in paths]

    def __getitem__(self, key: SampleKey | int) -> dict:
        key = SampleKey(*key) if isinstance(key, tuple) else SampleKey(0, 0, int(key))
        index = key.index
        for attempt in range(1, SUBSTITUTES + 2):
            info = self.get_data_info(index)
            info['unreadable'] = key.index if attempt > 1 else -1
            seed_generators(key)
            try:
                return self.pipeline(info)
            except UnreadableImageError as error:
                if self.on_error == 'error' or self.test_mode:
                    raise
                last = error
            index = sample_seed(key, attempt) % len(self)
        raise UnreadableImageError(f'{last}; {SUBSTITUTES} substitutes could not be read either')


def list_images(folder: str) -> list[str]:
    """Paths of all images below a folder, relative to it, sorted; hidden files and folders are left
    out."""
    images, folders = [], [('', frozenset())]
    while folders:
        inner, above = folders.pop()
        real = os.path.realpath(os.path.join(folder, inner))
        if real in above:  # a link back to a folder that this one lies in
            continue
        with os.scandir(real) as entries:
            for entry in entries:
                if entry.name.startswith('.'):
                    continue
                path = os.path.join(inner, entry.name)
                if entry.name.lower().endswith(EXTENSIONS):
                    images.append(path)
                elif entry.is_dir():
                    folders.append((path, above | {real}))
    return sorted(images)


def read_list(ann_file: str) -> list[str]:
    """Paths in an annotation list: one a line, a whole number after it (a label) is left out."""
    if not os.path.isfile(ann_file):
        raise FileNotFoundError(f'no file {ann_file!r}; expected a list of images, one path a line')
    with open(ann_file, encoding='utf-8') as file:
        return [re.sub(r'\s+\d+$', '', line.strip()) for line in file if line.strip()]

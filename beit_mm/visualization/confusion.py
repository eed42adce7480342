"""Which classes are taken for which: a picture, a table by class, and the hook that writes both after a test."""
import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from mmengine.dist import all_gather_object, is_main_process
from mmengine.hooks import Hook
from mmengine.logging import print_log
from mmengine.runner import Runner

from beit_mm.registry import HOOKS

MAX_NAMES = 120  # classes whose names can be read beside the picture
WORST = 5  # classes that the log names


def draw_confusion(matrix: np.ndarray, classes: Sequence[str], picture: Path) -> None:
    """Draws shares of each true class.

    Args:
        matrix: images (K, K), rows are true classes, columns predicted ones.
        classes: K names.
        picture: PNG file to write.
    """
    count = len(classes)
    named = count <= MAX_NAMES
    side = min(max(5.0, 0.22 * count), 26.0) if named else 12.0  # inches
    figure = Figure(figsize=(side + 1.5, side), layout='constrained')
    axis = figure.subplots()
    shares = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    figure.colorbar(axis.imshow(shares, vmin=0, vmax=1, cmap='viridis', interpolation='nearest'), fraction=0.04)
    axis.set(xlabel='predicted', ylabel='true', title='share of the true class')
    if named:
        axis.set_xticks(range(count), classes, rotation=90, fontsize=7)
        axis.set_yticks(range(count), classes, fontsize=7)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=80)


def class_rows(matrix: np.ndarray, classes: Sequence[str]) -> list[dict]:
    """For each class its name, number of images, accuracy in percent, and what it is most often taken for.

    Args:
        matrix: as `draw_confusion`.
        classes: K names.

    Returns:
        K dicts of `class`, `images`, `accuracy` (None without images), `most_taken_for` and `times`.
    """
    rows = []
    for label, counts in enumerate(matrix.tolist()):
        images, right = sum(counts), counts[label]
        counts[label] = 0
        other = int(np.argmax(counts))
        rows.append({'class': classes[label], 'images': images, 'accuracy': 100 * right / images if images else None,
                     'most_taken_for': classes[other] if counts[other] else '', 'times': counts[other]})
    return rows


@HOOKS.register_module()
class ConfusionHook(Hook):
    """After a classifier's test writes `confusion.png` and `per_class_accuracy.csv` into the work directory.

    Other models' tests it lets pass.
    """

    def __init__(self):
        self.pairs: dict[int, tuple[int, int]] = {}  # image -> true and predicted class

    def after_test_iter(self, runner: Runner, batch_idx: int, data_batch: dict, outputs: Sequence) -> None:
        """Notes the classes of a batch."""
        for sample in outputs:
            if 'pred_score' in sample and 'gt_label' in sample:
                self.pairs[sample.sample_idx] = int(sample.gt_label), int(sample.pred_score.argmax())

    def after_test_epoch(self, runner: Runner, metrics: dict | None = None) -> None:
        """Joins the images of all ranks, where some stand twice to fill the last batch, and writes the files."""
        gathered = all_gather_object(self.pairs)
        self.pairs = {}
        pairs = {image: pair for part in gathered for image, pair in part.items()}
        classes = runner.test_dataloader.dataset.metainfo.get('classes')
        if not pairs or not classes or not is_main_process():
            return
        matrix = np.zeros((len(classes), len(classes)), dtype=int)
        np.add.at(matrix, tuple(np.array(list(pairs.values())).T), 1)
        folder = Path(runner.work_dir)
        draw_confusion(matrix, classes, folder / 'confusion.png')
        rows = class_rows(matrix, classes)
        with (folder / 'per_class_accuracy.csv').open('w', newline='', encoding='utf-8') as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
        worst = sorted((row for row in rows if row['images']), key=lambda row: row['accuracy'])[:WORST]
        named = ', '.join(f"{row['class']} {row['accuracy']:.1f} %" for row in worst)
        print_log(f'Lowest accuracy by class: {named}; all in {folder / "per_class_accuracy.csv"}, drawn in '
                  f'{folder / "confusion.png"}', logger='current')

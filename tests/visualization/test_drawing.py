"""Pictures: the right colour at the right place, and curves from a run's log."""
import json
from pathlib import Path

import torch
from PIL import Image

from beit_mm.visualization.curves import draw_curves, read_scalars
from beit_mm.visualization.pictures import MARGIN, SIDE, TITLE_HEIGHT, draw_columns


def test_columns_and_rows_stand_where_they_belong():
    red, blue = torch.zeros(2, 3, 8, 8), torch.zeros(2, 3, 16, 16)
    red[:, 0] = 1
    blue[1, 2] = 1
    picture = draw_columns({'left': red, 'right': blue})
    cell = SIDE + MARGIN
    assert picture.size == (MARGIN + 2 * cell, TITLE_HEIGHT + MARGIN + 2 * cell)
    top, left = TITLE_HEIGHT + MARGIN + SIDE // 2, MARGIN + SIDE // 2
    assert picture.getpixel((left, top)) == (255, 0, 0)
    assert picture.getpixel((left + cell, top)) == (0, 0, 0)
    assert picture.getpixel((left + cell, top + cell)) == (0, 0, 255)
    assert picture.getpixel((1, top)) == (255, 255, 255)


def test_a_quarter_of_an_image_stays_a_quarter():
    image = torch.zeros(1, 3, 4, 4)
    image[..., :2, :2] = 1
    top = TITLE_HEIGHT + MARGIN
    cell = draw_columns({'': image}).crop((MARGIN, top, MARGIN + SIDE, top + SIDE))
    assert dict((color, count) for count, color in cell.getcolors()) == {
        (255, 255, 255): SIDE * SIDE // 4, (0, 0, 0): 3 * SIDE * SIDE // 4}


def write_log(work_dir: Path, time: str, rows: list[dict]) -> None:
    folder = work_dir / time / 'vis_data'
    folder.mkdir(parents=True)
    (folder / 'scalars.json').write_text(''.join(f'{json.dumps(row)}\n' for row in rows))


def test_curves_are_drawn_from_the_log(tmp_path):
    rows = [dict(lr=1e-3, loss=9 - step / 10, mim_acc=step / 100, step=step) for step in range(10)]
    write_log(tmp_path, '1', [*rows, dict(mim_loss=8.1, token_entropy=8.5, mim_acc=0.1, step=10)])
    draw_curves(tmp_path, tmp_path / 'out' / 'curves.png')
    with Image.open(tmp_path / 'out' / 'curves.png') as picture:
        assert picture.size == (1500, 350)  # loss, accuracy and learning rate, side by side
        left = picture.convert('RGB').crop((0, 0, 500, 350))
        assert len(left.getcolors(500 * 350)) > 50  # lines, not blank


def test_metrics_with_a_prefix_are_read(tmp_path):
    write_log(tmp_path, '1', [{'lr': 1.0, 'loss': 2.0, 'step': 1}, {'tokenizer/codes_used': 5, 'step': 1}])
    _, val = read_scalars(tmp_path)
    assert val == [dict(codes_used=5, step=1)]


def test_a_new_run_replaces_an_old_one_and_a_resumed_one_continues_it(tmp_path):
    write_log(tmp_path, '1', [dict(lr=1.0, loss=1.0, step=step) for step in (1, 2, 3, 4)])
    write_log(tmp_path, '2', [dict(lr=1.0, loss=2.0, step=step) for step in (3, 4, 5)])
    train, _ = read_scalars(tmp_path)
    assert [(r['step'], r['loss']) for r in train] == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0), (5, 2.0)]
    write_log(tmp_path, '3', [dict(lr=1.0, loss=3.0, step=1)])
    assert [(r['step'], r['loss']) for r in read_scalars(tmp_path)[0]] == [(1, 3.0)]


def test_an_empty_log_draws_nothing(tmp_path):
    write_log(tmp_path, '1', [])
    draw_curves(tmp_path, tmp_path / 'curves.png')
    assert not (tmp_path / 'curves.png').exists()

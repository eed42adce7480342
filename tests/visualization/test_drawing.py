"""Pictures: the right colour at the right place, and curves from a run's log."""
import json

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


def test_curves_are_drawn_from_the_log(tmp_path):
    rows = [dict(lr=1e-3, loss=9 - step / 10, mim_acc=step / 100, step=step) for step in range(10)]
    rows.append(dict(mim_loss=8.1, token_entropy=8.5, mim_acc=0.1, step=10))
    log = tmp_path / 'scalars.json'
    log.write_text('\n'.join(map(json.dumps, rows)) + '\n')
    train, val = read_scalars(log)
    assert (len(train), len(val)) == (10, 1)
    draw_curves(log, tmp_path / 'out' / 'curves.png')
    with Image.open(tmp_path / 'out' / 'curves.png') as picture:
        assert picture.size == (1500, 350)  # loss, accuracy and learning rate, side by side
        assert len(picture.convert("RGB").crop((0, 0, 500, 350)).getcolors(175_000)) > 50  # lines, not blank


def test_an_empty_log_draws_nothing(tmp_path):
    (tmp_path / 'scalars.json').write_text('')
    draw_curves(tmp_path / 'scalars.json', tmp_path / 'curves.png')
    assert not (tmp_path / 'curves.png').exists()

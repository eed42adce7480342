"""Uses trained weights: writes what they say about images, and draws what they predict and attend to."""

import csv
import io
import json
import os
import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import count, islice
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from mmengine.dataset import default_collate
from PIL import Image

from beit_mm import pictures
from beit_mm.apis.configs import NARROW_PRETRAINING, bundled_config, mask_settings, pipeline_for_size
from beit_mm.apis.inferencers import ClassificationInferencer, reduction
from beit_mm.apis.rebuild import rebuild_pretrainer
from beit_mm.checkpoint.checkpoint import Checkpoint, CheckpointInput, PerChannel
from beit_mm.checkpoint.find import PHOTOS
from beit_mm.datasets.geotiff import Place
from beit_mm.datasets.reading import UnreadableImageError
from beit_mm.datasets.segmentation_folder import IGNORE_INDEX, class_line
from beit_mm.datasets.transforms import as_size
from beit_mm.errors import UserError
from beit_mm.features.extractor import FeatureExtractor, ImageInput, ImageReader, Sources, iterate_images
from beit_mm.files import atomic_file, unlinked, unquoted, write_lines
from beit_mm.models.beit import BEiTPretrainer
from beit_mm.registry import TRANSFORMS, building
from beit_mm.terminal import quiet, say, with_bar

SHORT_SIDE = 30  # patches of an image whose attention is drawn, as in the authors' figure
MAX_ROWS = 64  # in a picture of reconstructions
MANY_BYTES = 10**9  # of probabilities
BEST_THREE = ['class', 'probability', 'class_2', 'probability_2', 'class_3', 'probability_3']  # columns of a table
CONFIDENCE = 'confidence.csv'
FORMULA = (*'=+-@＝＋－＠', '\t', '\r')  # beginnings of a formula in a spreadsheet

Segmentor: TypeAlias = Any  # a SegmentationInferencer, or another with its `classes`, `palette`, `reader` and call


def classify_images(classifier: ClassificationInferencer, images: Sources) -> list[dict[str, Any]]:
    """What a classifier answers on images, see ClassificationInferencer; dict(path, error) for unreadable ones."""
    sources = list(classifier.reader.sources(images))
    found = classifier.reader.results(sources, classifier.predict, 32, on_error='skip')
    return list(with_bar(found, len(sources)))


def link_images(folder: Path, results: Sequence[dict[str, Any]], least: float) -> None:
    """Links the images whose class has at least the probability `least`, in one folder per class."""
    sure = [result for result in results if 'error' not in result and result['scores'][0][1] >= least]
    labels = defaultdict(set)
    for result in sure:
        labels[unquoted(result['name'])].add(result['label'])
    used: dict[str, int] = {}
    for result in sure:
        name, file = unquoted(result['name']), Path(result['path'])
        if '/' in name or name.startswith('.'):
            raise UserError(f'class {name!r} cannot be the name of a folder of images')
        name += f' {result["label"]}' if len(labels[name]) > 1 else ''  # two classes of ImageNet are called crane
        (folder / name).mkdir(exist_ok=True)
        (folder / unused(f'{name}/{file.stem}', file.suffix, used)).symlink_to(file.resolve())


def unused(stem: str, suffix: str, used: dict[str, int]) -> str:
    """The first unused name among a.png, a_2.png, a_3.png, ...; `used` has the number to try next for each name."""
    name = first = f'{stem}{suffix}'
    for number in count(used.get(first, 2)):
        if name not in used:
            break
        name, used[first] = f'{stem}_{number}{suffix}', number + 1
    used.setdefault(name, 2)
    return name


def write_results(path: Path, results: Sequence[dict[str, Any]], classes: Sequence[str]) -> None:
    """Writes what `classify` returns as .json, or as a table of its most likely classes, .csv."""
    if path.suffix == '.json':
        write_json(path, results)
        return
    columns = ['classes', *classes] if any('probabilities' in row for row in results) else BEST_THREE
    rows = [(row['path'], *cells_of(row, classes, len(columns))) for row in results]
    write_table(path, ['path', *columns, 'error'], rows)


def write_json(path: Path, results: Sequence[dict[str, Any]]) -> None:
    with atomic_file(path) as file:
        file.write(os.fsencode(json.dumps(list(results), indent=1) + '\n'))


def cells_of(result: dict[str, Any], classes: Sequence[str], columns: int) -> list[str]:
    """What a table says of an image: so many columns, then why it could not be read."""
    if 'error' in result:
        return [*[''] * columns, result['error']]
    cells = [*summary_of(result)]
    if 'probabilities' not in result:
        for label, share in result['scores'][1:3]:
            cells += [classes[label], f'{share:.3f}']
    return [*cells, *[''] * (columns + 1 - len(cells))]


def write_table(path: Path, head: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Writes rows (file, texts) as CSV for spreadsheets, which would run some texts as formulas: these are prefixed."""
    text = io.StringIO(newline='')
    table = csv.writer(text, quoting=csv.QUOTE_ALL)
    for file, *others in [head, *rows]:
        file = f'./{file}' if file and file.startswith(FORMULA) else file  # None for an array
        table.writerow([file, *(f"'{each}" if each.startswith(FORMULA) else each for each in others)])
    with atomic_file(path) as stream:
        # a file name may hold any bytes; without the mark of UTF-8 Excel reads a local encoding
        stream.write(text.getvalue().encode('utf-8-sig', 'surrogateescape'))


def summary_of(result: dict[str, Any]) -> tuple[str, ...]:
    """Name and probability in a result of `classify`, or names and all probabilities."""
    if 'probabilities' in result:
        return '; '.join(result['names']), *(f'{share:.3f}' for share in result['probabilities'].values())
    return result['name'], f'{result["scores"][0][1]:.3f}'


def write_maps(
    results: Iterable[dict[str, Any]],
    segmentor: Segmentor,
    folder: Path,
    least: float | None,
    confidence_maps: bool = False,
    number: int = 1,
) -> list[dict[str, Any]]:
    """Writes the files of `segment` on a `number` of images, and returns what it returns; `least`: `min_confidence`."""
    lines = [class_line(unquoted(name)) for name in segmentor.classes]
    if least is not None:
        if len(lines) >= IGNORE_INDEX:
            raise UserError(f'--min-confidence is for at most {IGNORE_INDEX - 1} classes; the model has {len(lines)}')
        # if no pixel keeps some class, the number of names does not show what 0 means
        lines = ['Number\tName', *(f'{number}\t{line}' for number, line in enumerate(lines))]
    head = ['path', 'labels', 'confidence', 'error']
    write_table(folder / CONFIDENCE, head, [])  # first, so that a later call recognises the folder as one of `segment`
    for name in ('labels', 'overlays', *(['confidence'] if confidence_maps else [])):
        (folder / name).mkdir(parents=True, exist_ok=True)
    write_lines(folder / 'classes.txt', lines)
    written: list[dict[str, Any]] = []
    rows: list[tuple[str | None, str, str, str]] = []
    used: dict[str, int] = {}
    expected = 0.0  # bytes of the probabilities of all images
    for result in results:
        path = result['path']
        if 'error' in result:
            written.append(result)
            rows.append((path, '', '', result['error']))
            continue
        name = unused(Path(path or 'image').stem, '.png', used)
        if 'probabilities' in result and not expected:
            expected = number * result['probabilities'].nbytes
            (folder / 'probabilities').mkdir(exist_ok=True)
            if expected > MANY_BYTES:
                say(f'{folder}/probabilities will take about {expected / 1e9:.1f} GB, judging by the first image.')
        written.append(write_map(result, segmentor, folder, name, least, confidence_maps))
        rows.append((path, f'labels/{Path(written[-1]["labels"]).name}', f'{written[-1]["confidence"]:.3f}', ''))
        if written[-1].get('labelled'):
            (folder / 'images').mkdir(exist_ok=True)
            (folder / 'images' / name).with_suffix(Path(path).suffix).symlink_to(Path(path).resolve())
    write_table(folder / CONFIDENCE, head, rows)
    return written


def write_map(
    result: dict[str, Any], segmentor: Segmentor, folder: Path, name: str, least: float | None, confidence_map: bool
) -> dict[str, Any]:
    """Writes the label map and overlay of an image; returns what `segment` returns for it."""
    labels, confidence, image = result['labels'], result['confidence'], result['image']
    probabilities = result.get('probabilities')
    files = dict(path=result['path'], overlay=str(folder / 'overlays' / name))
    has_free_number = len(segmentor.classes) <= IGNORE_INDEX
    place = Place(result['path'] if has_free_number else None, labels.shape)
    place.hide_no_data(labels, IGNORE_INDEX, confidence)
    files['confidence'] = float(confidence.sum(dtype=np.float64) / max(np.count_nonzero(confidence), 1))
    if least is not None:
        labels[confidence < least] = IGNORE_INDEX
        files['labelled'] = np.count_nonzero(labels != IGNORE_INDEX) / labels.size
    # with a shorter palette Pillow would write fewer than 8 bits per pixel
    colours = np.full((256, 3), 255, np.uint8)
    colours[: len(segmentor.palette)] = segmentor.palette[:256]
    files['labels'] = place.write(
        folder / 'labels' / name, labels, IGNORE_INDEX, colours if labels.dtype == np.uint8 else None
    )
    if probabilities is not None:
        probabilities *= confidence > 0  # also 0 where a GeoTIFF has no data
        files['probabilities'] = str((folder / 'probabilities' / name).with_suffix('.npz'))
        np.savez(
            unlinked(files['probabilities']), probabilities=probabilities, classes=[*map(unquoted, segmentor.classes)]
        )
    if confidence_map:
        confidence *= 255  # in place, because a large image leaves no room for a copy
        levels = np.rint(confidence, out=confidence).astype(np.uint8)
        files['confidence_map'] = place.write(folder / 'confidence' / name, levels, 0, scale=1 / 255)
    step = reduction(labels.shape)
    shown = labels[::step, ::step].astype(np.int32)
    if has_free_number:
        shown[shown == IGNORE_INDEX] = -1
    if image.shape[:2] != shown.shape:
        image = np.asarray(Image.fromarray(image).reduce(step))
    found, pixels = np.unique(shown[shown >= 0], return_counts=True)
    legend = [(segmentor.classes[label], segmentor.palette[label]) for label in found[pixels.argsort()[::-1]]]
    pictures.with_legend(overlay(image, shown, segmentor.palette), legend).save(unlinked(files['overlay']))
    return files


def overlay(pixels: np.ndarray, labels: np.ndarray, palette: Sequence[Sequence[int]]) -> Image.Image:
    """An image uint8 (H, W, 3) under the colours of its labels (H, W); labels below 0 have no colour."""
    image, colours = Image.fromarray(pixels), Image.fromarray(np.array(palette, np.uint8)[labels])
    return Image.composite(Image.blend(image, colours, 0.6), image, Image.fromarray(labels >= 0))


def reconstruct(
    checkpoint: CheckpointInput,
    images: Sources = PHOTOS,
    out: str | Path = 'reconstruction.png',
    mean: PerChannel = None,
    std: PerChannel = None,
) -> Path:
    """Draws images, what a pretrained model sees of them, what it predicts for the masked patches, and the truth.

    Features have no picture: each masked patch is drawn as the masked one whose features are nearest to the prediction.

    Args:
        checkpoint, mean, std: see `classify`.
        images: see `classify`; the first 64 are drawn, except unreadable ones.
        out: picture.
    """
    out = check_picture(out)
    with quiet():
        model = draw_predictions(Checkpoint.open(checkpoint, mean=mean, std=std), images, out)
    if model.target_generator.gives == 'features':
        say('Features have no picture: each masked patch shows the masked one with the nearest features.')
    return out


def draw_predictions(checkpoint: Checkpoint, images: Sources, out: Path) -> BEiTPretrainer:
    model = rebuild_pretrainer(checkpoint)
    sources = [*islice(iterate_images(images), MAX_ROWS + 1)]
    if len(sources) > MAX_ROWS:
        say(f'Only the first {MAX_ROWS} images are drawn.')
    samples = masked_samples(model, sources[:MAX_ROWS])
    columns = pictures.reconstructed(model, model.data_preprocessor(default_collate(samples))['inputs'])
    pictures.sheet_of_columns(columns).save(out)
    return model


def check_picture(out: str | Path) -> Path:
    """The path of a picture, checked before any work is done; makes its folder."""
    path = Path(out).expanduser()
    if path.suffix.lower() not in ('.png', '.jpg', '.jpeg', '.webp') or path.is_dir():
        raise UserError(f'{str(out)!r}: expected the path of a picture, ending in .png or .jpg')
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def masked_samples(model: BEiTPretrainer, images: Sequence[ImageInput]) -> list[dict]:
    """Prepares each image that can be read, with the same masks at every call."""
    rows, columns = grid = model.backbone.grid
    size = rows * model.backbone.patch_size, columns * model.backbone.patch_size
    steps = bundled_config(NARROW_PRETRAINING).val_pipeline
    steps = pipeline_for_size(steps, size, **mask_settings(grid, model.target_generator.stride))
    reader = ImageReader([TRANSFORMS.build(step) for step in steps])
    samples: list[dict] = []
    problems: list[str] = []
    with building():
        state = random.getstate()
        for index, image in enumerate(images):
            random.seed(index)  # masks are drawn by this generator
            try:
                samples.append(reader.prepare(reader.load(image)))
            except UnreadableImageError as error:
                problems.append(str(error))
        random.setstate(state)
    if not samples:
        raise UnreadableImageError(problems[0] if problems else 'no images; expected files or folders of images')
    for problem in problems:
        say(f'unreadable: {problem}')
    return samples


def attention(
    checkpoint: CheckpointInput,
    image: str | Path = PHOTOS / 'yellow_bus.jpg',
    points: str | Sequence[str] = '0.5,0.5',
    out: str | Path = 'attention.png',
    layer: int = -1,
    short_side: int | None = None,
    mean: PerChannel = None,
    std: PerChannel = None,
) -> Path:
    """Draws what points of an image attend to, in every head of a layer, beside the same with random weights.

    Args:
        checkpoint, mean, std: see `classify`.
        image: a file; by default a packaged photo.
        points: 'x,y' in pixels, or in shares of width and height with decimal points; several joined by ';' or listed.
        out: picture; several points are drawn one below the other.
        layer: block, counted from 0, or from the end if negative.
        short_side: short side, in pixels, at which the model sees the image; by default the checkpoint's size, but at
            least 30 patches.
    """
    path = check_picture(out)
    with quiet():
        opened = Checkpoint.open(checkpoint, mean=mean, std=std)
        arguments = opened.backbone_arguments()
        usual = max(min(as_size(arguments['img_size'])), SHORT_SIDE * arguments['patch_size'])
        size = usual if short_side is None else short_side
        extractor = FeatureExtractor(opened, size=size, whole=True)
        places = points.split(';') if isinstance(points, str) else points
        found = pictures.attention_of_image(extractor, image, places, layer)
        control = pictures.attention_of_image(extractor.with_random_weights(), image, places, layer)
        pictures.with_legend(pictures.draw_attention(found, control), pictures.ATTENTION_LEGEND).save(path)
    return path

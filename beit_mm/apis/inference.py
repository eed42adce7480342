"""Uses trained weights, each in one call: classify, segment, pseudo labels of both, reconstruct, attention."""

import csv
import io
import json
import os
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import count, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import numpy as np
import torch
from mmengine.dataset import default_collate
from PIL import Image

from beit_mm.apis import split
from beit_mm.apis.configs import bundled_config, mask_settings, pipeline_for_size
from beit_mm.apis.inferencers import ClassificationInferencer, SegmentationInferencer
from beit_mm.apis.plans import NARROW_PRETRAINING
from beit_mm.apis.rebuild import rebuild_pretrainer
from beit_mm.checkpoint.checkpoint import Checkpoint, CheckpointInput, PerChannel
from beit_mm.checkpoint.find import PHOTOS, SCENES
from beit_mm.datasets.reading import MAX_PIXELS, UnreadableImageError
from beit_mm.datasets.segmentation_folder import IGNORE_INDEX, SegmentationFolder, class_line
from beit_mm.datasets.transforms import as_size
from beit_mm.engine.metrics import describe
from beit_mm.errors import UserError
from beit_mm.features.evaluation import knn_votes, patch_classifier, patch_dataset, pixel_scores
from beit_mm.features.extractor import ExistingPath, FeatureExtractor, ImageInput, ImageReader, Sources, iterate_images
from beit_mm.files import atomic_file, quoted, unquoted
from beit_mm.models.beit import BEiTPretrainer
from beit_mm.pictures import ATTENTION_LEGEND, attention_of_image, draw_attention, sheet_of_columns, with_legend
from beit_mm.registry import TRANSFORMS
from beit_mm.terminal import quiet, say, with_bar

SHORT_SIDE = 30  # patches of an image whose attention is drawn, as in the authors' figure
MAX_ROWS = 64  # in a picture of reconstructions
CONFIDENCE = 'confidence.csv'
FORMULA = (*'=+-@＝＋－＠', '\t', '\r')  # beginnings of a formula in a spreadsheet


def classify(
    checkpoint: CheckpointInput,
    images: Sources = PHOTOS,
    labelled: str | Path | None = None,
    out: str | Path | None = None,
    mean: PerChannel = None,
    std: PerChannel = None,
    min_confidence: float | None = None,
) -> list[dict[str, Any]]:
    """Classifies images: with a fine-tuned classifier, or by the most similar labelled images.

    Args:
        checkpoint, mean, std: see `Checkpoint.open`.
        images: files, folders, arrays, PIL images, see `ImageReader.results`.
        labelled: folder with one folder per class, for a model without classes of its own.
        out: file for the results, .csv or .json.
        min_confidence: make `out` a folder that `finetune` reads: classes.csv has the results, and one folder per class
            has links to the images whose class has at least this probability.

    Returns:
        For each image dict(path, label, name, scores), see ClassificationInferencer; with `labelled` a score is a
        class's share in the vote of the nearest images. For an unreadable image dict(path, error).
    """
    is_folder = out is not None and Path(out).suffix not in ('.csv', '.json')
    if is_folder != (min_confidence is not None):
        raise UserError(f'--out is {out}; expected a .csv or .json file, or with --min-confidence a folder')
    check_confidence(min_confidence)
    path = Path(out or '').expanduser()
    if is_folder and any(found.is_dir() for found in path.glob('*')):
        raise UserError(f'{path} has folders already, which would be learned from too; give another --out')
    with quiet():
        opened = Checkpoint.open(checkpoint, 'classifier' if labelled is None else 'pretrained', mean=mean, std=std)
        if labelled is not None:
            results = classify_by_neighbours(opened, images, labelled)
        else:
            classifier = ClassificationInferencer(opened)
            sources = list(classifier.reader.sources(images))
            found = classifier.reader.results(sources, classifier.predict, 32, on_error='skip')
            results = list(with_bar(found, len(sources)))
    if min_confidence is not None:
        write_results(path / 'classes.csv', results)
        link_images(path, results, min_confidence)
    elif out is not None:
        write_results(path, results)
    return results


def check_confidence(least: float | None) -> None:
    if least is not None and not 0 <= least <= 1:
        raise UserError(f'--min-confidence is {least}; expected a number from 0 to 1')


def link_images(folder: Path, results: Sequence[dict[str, Any]], least: float) -> None:
    """Links the images whose class has at least the probability `least`, in one folder per class."""
    sure = [result for result in results if 'error' not in result and result['scores'][0][1] >= least]
    labels = defaultdict(set)
    for result in sure:
        labels[unquoted(result['name'])].add(result['label'])
    used: set[str] = set()
    for result in sure:
        name, file = unquoted(result['name']), Path(result['path'])
        if '/' in name or name.startswith('.'):
            raise UserError(f'class {name!r} cannot be the name of a folder of images')
        name += f' {result["label"]}' if len(labels[name]) > 1 else ''  # two classes of ImageNet are called crane
        (folder / name).mkdir(exist_ok=True)
        (folder / unused(f'{name}/{file.stem}', file.suffix, used)).symlink_to(file.resolve())


def unused(stem: str, suffix: str, used: set[str]) -> str:
    """The first unused name among a.png, a_2.png, a_3.png, ...; adds it to `used`."""
    names = (f'{stem}_{number}{suffix}' if number > 1 else f'{stem}{suffix}' for number in count(1))
    used.add(name := next(name for name in names if name not in used))
    return name


def classify_by_neighbours(checkpoint: Checkpoint, images: Sources, labelled: str | Path) -> list[dict[str, Any]]:
    bank = split.list_folder(split.training_folder(labelled))
    classes = sorted({*bank.names.values()} - {''})
    extract = FeatureExtractor(checkpoint)
    known = {str(bank.root / path): classes.index(name) for path, name in bank.names.items() if name}
    features, samples = extract.means([*map(ExistingPath, known)])
    labels = torch.tensor([known[sample['path']] for sample in samples if 'error' not in sample])
    if (number := len(labels.unique())) < 2:
        folders = f'{len(classes)} class folders, {number} of them with readable images'
        raise UserError(f'--labelled: {str(labelled)!r} has {folders}; expected 2 or more')
    queries, found = extract.means([*extract.reader.sources(images)])
    shares = (row / row.sum() for votes in knn_votes(queries, features, labels, len(classes)) for row in votes)
    names = [*map(quoted, classes)]  # as a classifier's
    return [result if 'error' in result else describe(next(shares), names, result['path']) for result in found]


def write_results(path: Path, results: Sequence[dict[str, Any]]) -> None:
    if path.suffix == '.json':
        with atomic_file(path) as file:
            file.write(os.fsencode(json.dumps(list(results), indent=1) + '\n'))
    else:
        write_table(path, ['path', 'class', 'probability'], [(row['path'], *summary_of(row)) for row in results])


def write_table(path: Path, head: Sequence[str], rows: Iterable[tuple[str | None, str, str]]) -> None:
    """Writes rows (file, text, number) as CSV; text that a spreadsheet would run as a formula is prefixed."""
    text = io.StringIO(newline='')
    table = csv.writer(text, quoting=csv.QUOTE_ALL)
    table.writerow(head)
    for file, name, number in rows:
        file = f'./{file}' if file and file.startswith(FORMULA) else file  # None for an array
        table.writerow([file, f"'{name}" if name.startswith(FORMULA) else name, number])
    with atomic_file(path) as stream:
        stream.write(os.fsencode(text.getvalue()))  # file names may hold any bytes


def summary_of(result: dict[str, Any]) -> tuple[str, str]:
    """Name and probability in a result of `classify`, as text; for an unreadable image the error."""
    if 'error' in result:
        return f'unreadable: {result["error"]}', ''
    return result['name'], f'{result["scores"][0][1]:.3f}'


def segment(
    checkpoint: CheckpointInput,
    images: Sources = SCENES,
    out: str | Path = 'segmentation',
    labelled: str | Path | None = None,
    short_side: int | None = None,
    reduce_zero_label: bool | None = None,
    multi_scale: bool = False,
    max_pixels: int | None = None,
    mean: PerChannel = None,
    std: PerChannel = None,
    min_confidence: float | None = None,
) -> list[dict[str, Any]]:
    """Segments images into label maps and overlays: with a segmentor, or by the most similar labelled patches.

    Args:
        checkpoint, mean, std: see `Checkpoint.open`.
        images: files, folders, arrays (labels/image.png, image_2.png, ...), see `ImageReader.results`.
        out: folder for classes.txt, labels/<name>.png (indices into classes.txt from 0; a palette has the classes'
            colours, if there are at most 256), overlays/<name>.png with a legend, and confidence.csv.
        labelled: folder of images and label maps, see `find_label_maps`, for a model without classes of its own.
        short_side: with `labelled`, of the images that the model sees, in pixels; None: the checkpoint's.
        reduce_zero_label: whether 0 marks unlabelled pixels in `labelled`; None: as its classes.txt shows.
        multi_scale: average a segmentor's predictions over all scales and flips.
        max_pixels: limit for an image, and for a label map in `labelled`; None: 178,956,970.
        min_confidence: make `out` a folder that `finetune` reads: pixels whose class is less probable are 255 in the
            label map, and images/ has links to the images that keep any label.

    Returns:
        For each image dict(path, labels=file, overlay=file, confidence=mean probability of its pixels' labels; with
        `labelled` their share in the nearest patches), with `min_confidence` also labelled=share of pixels, 0 to 1.
        Overlays of many bands show bands 1 to 3. For an unreadable image dict(path, error).
    """
    with quiet():
        opened = Checkpoint.open(checkpoint, 'segmentor' if labelled is None else 'pretrained', mean=mean, std=std)
        folder = Path(out).expanduser()
        check_confidence(min_confidence)
        reserved = ['images']  # of an earlier call with min_confidence, or of the user: they would be learned from too
        if not (folder / CONFIDENCE).exists():
            reserved += ['labels', 'classes.txt']  # the user's own
        for name in reserved:
            if (folder / name).exists():
                raise UserError(f'{folder / name} is there already; give another --out')
        segmentor: Segmentor
        if labelled is None:
            if short_side is not None or reduce_zero_label is not None:
                raise UserError('--short-side, --keep- and --reduce-zero-label need --labelled FOLDER; give that too')
            segmentor = SegmentationInferencer(opened, multi_scale=multi_scale, max_pixels=max_pixels)
        elif multi_scale:
            raise UserError('--multi-scale is for segmentors; leave it or --labelled out')
        else:
            limit = MAX_PIXELS if max_pixels is None else max_pixels
            if not (found := split.find_label_maps(labelled, reduce_zero_label, True, max_pixels=limit)):
                raise FileNotFoundError(f'--labelled: no label maps in {str(labelled)!r}; {split.EXPECTED}')
            extract = FeatureExtractor(opened, size=short_side, whole=True, max_pixels=limit)
            with TemporaryDirectory() as lists:
                split.write_lists(found, Path(lists))
                dataset = patch_dataset(extract, **found.dataset(Path(lists), 'train'))
            segmentor = PatchSegmentor(extract, dataset)
        sources = list(segmentor.reader.sources(images))
        results = with_bar(segmentor(sources, on_error='skip', return_images=True), len(sources))
        return write_maps(results, segmentor, folder, min_confidence)


class PatchSegmentor:
    """Segments images by frozen features: a `patch_classifier` learns, by `method`, from a `patch_dataset`.

    Call it like a SegmentationInferencer; with 'knn' the confidence is the label's share in the nearest patches.
    """

    def __init__(self, extract: FeatureExtractor, dataset: SegmentationFolder, method: str = 'knn') -> None:
        self.extract, self.reader = extract, extract.reader
        self.classes, self.palette = [*map(quoted, dataset.metainfo['classes'])], dataset.metainfo['palette']
        self.scores_of, _ = patch_classifier(extract, dataset, method)

    def __call__(
        self, images: Sources, on_error: str = 'raise', return_images: bool = False
    ) -> Iterator[dict[str, Any]]:
        return self.reader.results(images, self.predict, on_error=on_error, return_images=return_images)

    def predict(self, samples: list[dict]) -> list[dict[str, Any]]:
        (sample,) = samples
        patches = self.extract.features(sample['inputs'][None], [None])['patches'][0, 0]  # h, w, C
        scores = pixel_scores(self.scores_of(patches), sample['data_samples'].ori_shape)  # K, H, W
        return [dict(labels=scores.argmax(dim=0).byte().cpu().numpy(), confidence=scores.amax(dim=0).cpu().numpy())]


Segmentor: TypeAlias = SegmentationInferencer | PatchSegmentor


def write_maps(
    results: Iterable[dict[str, Any]], segmentor: Segmentor, folder: Path, least: float | None
) -> list[dict[str, Any]]:
    """Writes the files of `segment`; `least` is its `min_confidence`."""
    lines = [class_line(unquoted(name)) for name in segmentor.classes]
    if least is not None:
        if len(lines) >= IGNORE_INDEX:
            raise UserError(f'--min-confidence is for at most {IGNORE_INDEX - 1} classes; the model has {len(lines)}')
        # if no pixel keeps some class, the number of names does not show what 0 means
        lines = ['Number\tName', *(f'{number}\t{line}' for number, line in enumerate(lines))]
    head = ['path', 'labels', 'confidence']
    write_table(folder / CONFIDENCE, head, [])  # first, so that a later call recognises the folder as one of `segment`
    for name in ('labels', 'overlays'):
        (folder / name).mkdir(parents=True, exist_ok=True)
    split.write_lines(folder / 'classes.txt', lines)
    written: list[dict[str, Any]] = []
    rows: list[tuple[str | None, str, str]] = []
    used: set[str] = set()
    for result in results:
        path = result['path']
        if 'error' in result:
            written.append(result)
            rows.append((path, f'unreadable: {result["error"]}', ''))
            continue
        name = unused(Path(path or 'image').stem, '.png', used)
        written.append(write_map(result, segmentor, folder, name, least))
        rows.append((path, f'labels/{name}', f'{written[-1]["confidence"]:.3f}'))
        if written[-1].get('labelled'):
            (folder / 'images').mkdir(exist_ok=True)
            (folder / 'images' / name).with_suffix(Path(path).suffix).symlink_to(Path(path).resolve())
    write_table(folder / CONFIDENCE, head, rows)
    return written


def write_map(
    result: dict[str, Any], segmentor: Segmentor, folder: Path, name: str, least: float | None
) -> dict[str, Any]:
    """Writes the label map and overlay of an image; returns what `segment` returns for it."""
    labels, confidence = result['labels'], result['confidence']
    files = dict(path=result['path'], labels=str(folder / 'labels' / name), overlay=str(folder / 'overlays' / name))
    files['confidence'] = float(confidence.mean())
    colours, shown = np.array(segmentor.palette, np.uint8), labels
    if least is not None:
        known = confidence >= least
        files['labelled'] = float(known.mean())
        labels, shown = np.where(known, labels, np.uint8(IGNORE_INDEX)), np.where(known, labels, np.int32(-1))
        # with a shorter palette Pillow would write fewer than 8 bits per pixel
        colours = np.pad(colours, ((0, 256 - len(colours)), (0, 0)), constant_values=255)
    image = Image.fromarray(labels)
    if labels.dtype == np.uint8:
        image.putpalette(colours.tobytes())
    image.save(files['labels'])
    found, pixels = np.unique(shown[shown >= 0], return_counts=True)
    legend = [(segmentor.classes[label], segmentor.palette[label]) for label in found[pixels.argsort()[::-1]]]
    with_legend(overlay(result['image'], shown, segmentor.palette), legend).save(files['overlay'])
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
    """Draws images, what the model sees of them, what it predicts for the masked patches, and the true tokens decoded.

    Features have no picture: each masked patch is drawn as the masked one whose features are nearest to the prediction.

    Args:
        checkpoint, mean, std: of a pretraining on visual tokens or features, see `Checkpoint.open`.
        images: files, folders, arrays, PIL images; the first 64 images are drawn, except unreadable ones.
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
    with torch.no_grad():
        columns = model.pictures(model.data_preprocessor(default_collate(samples))['inputs'])
    sheet_of_columns(columns).save(out)
    return model


def check_picture(out: str | Path) -> Path:
    """The path of a picture, checked before any work is done; makes its folder."""
    path = Path(out).expanduser()
    if path.suffix.lower() not in ('.png', '.jpg', '.jpeg', '.webp') or path.is_dir():
        raise UserError(f'{str(out)!r}: expected the path of a picture, ending in .png or .jpg')
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def masked_samples(model: BEiTPretrainer, images: Iterable[ImageInput]) -> list[dict]:
    """Prepares each image that can be read, with the same masks at every call."""
    rows, columns = grid = model.backbone.grid
    size = rows * model.backbone.patch_size, columns * model.backbone.patch_size
    steps = bundled_config(NARROW_PRETRAINING).val_pipeline
    steps = pipeline_for_size(steps, size, **mask_settings(grid, model.target_generator.stride))
    reader = ImageReader([TRANSFORMS.build(step) for step in steps])
    samples: list[dict] = []
    problems: list[str] = []
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
        checkpoint, mean, std: of any BEiT or plain ViT, see `Checkpoint.open`.
        image: path.
        points: 'x,y' in pixels, or in shares of width and height with decimal points; several joined by ';' or listed.
        out: picture; several points are drawn one below the other.
        layer: block, counted from 0, or from the end if negative.
        short_side: of the image that the model sees, in pixels; None: the checkpoint's, but at least 30 patches.
    """
    path = check_picture(out)
    with quiet():
        opened = Checkpoint.open(checkpoint, mean=mean, std=std)
        arguments = opened.backbone_arguments()
        usual = max(min(as_size(arguments['img_size'])), SHORT_SIDE * arguments['patch_size'])
        size = usual if short_side is None else short_side
        extractor = FeatureExtractor(opened, size=size, whole=True)
        places = points.split(';') if isinstance(points, str) else points
        found = attention_of_image(extractor, image, places, layer)
        control = attention_of_image(extractor.with_random_weights(), image, places, layer)
        with_legend(draw_attention(found, control), ATTENTION_LEGEND).save(path)
    return path

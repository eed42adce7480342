"""Names the class of images or of pixels: with a trained model or, without training, by the nearest labelled images."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from beit_mm.apis import inference
from beit_mm.apis.inferencers import ClassificationInferencer, SegmentationInferencer
from beit_mm.checkpoint.checkpoint import CheckpointInput, PerChannel
from beit_mm.checkpoint.find import PHOTOS, SCENES
from beit_mm.datasets.reading import MAX_PIXELS
from beit_mm.datasets.segmentation_folder import SegmentationFolder
from beit_mm.engine.metrics import describe
from beit_mm.errors import UserError, check_no_folder
from beit_mm.features.evaluation import knn_votes, patch_classifier, patch_dataset, pixel_scores
from beit_mm.features.extractor import ExistingPath, FeatureExtractor, ImageInput, Sources
from beit_mm.files import quoted
from beit_mm.own_images.images import list_folder, write_lists
from beit_mm.own_images.label_maps import LabelMaps, find_label_maps
from beit_mm.own_images.layouts import EXPECTED, find_class_folders
from beit_mm.terminal import quiet, with_bar


def classify(
    checkpoint: CheckpointInput,
    images: Sources = PHOTOS,
    labelled: str | Path | None = None,
    out: str | Path | None = None,
    mean: PerChannel = None,
    std: PerChannel = None,
    min_confidence: float | None = None,
    json: str | Path | None = None,
) -> list[dict[str, Any]]:
    """Names the class of images, with a classifier or by the most similar labelled images.

    Args:
        checkpoint: 'demo' (packaged weights), a file, the folder of a run, a URL, or the name of a released model.
        images: files and folders, in Python also arrays and PIL images, see `ImageReader.results`; by default five
            photos that come with the package.
        labelled: folder with one folder per class, whose nearest images decide, for a model without classes.
        out: file for the results, .csv (the three most likely classes) or .json; with `min_confidence` a folder.
        mean: of the images' channels, one number or one for each, pixels 0-255; by default as the checkpoint says.
        std: their standard deviation, like `mean`.
        min_confidence: make `out` a folder that `finetune` reads: classes.csv has the results, and one folder per class
            has links to the images whose class has at least this probability, 0 to 1.
        json: file for what Python returns, beside `out`.

    Returns:
        For each image dict(path, label, name, scores), see ClassificationInferencer; with `labelled` a score is a
        class's share in the vote of the nearest images. For an unreadable image dict(path, error).
    """
    is_folder = out is not None and Path(out).suffix not in ('.csv', '.json')
    if is_folder != (min_confidence is not None):
        raise UserError(f'--out is {out}; expected a .csv or .json file, or with --min-confidence a folder')
    check_confidence(min_confidence)
    check_no_folder('--json', json)
    path = Path(out or '').expanduser()
    if is_folder and any(found.is_dir() for found in path.glob('*')):
        raise UserError(f'{path} has folders already, which would be learned from too; give another --out')
    with quiet():
        if labelled is None:
            classifier = ClassificationInferencer(checkpoint, mean=mean, std=std)
            if is_folder and classifier.has_several_labels:
                raise UserError(f'{checkpoint} gives several labels; leave out --min-confidence, give --out FILE.csv')
            check_linkable(min_confidence, images := list(classifier.reader.sources(images)))
            results, classes = inference.classify_images(classifier, images), list(classifier.classes)
        else:
            extractor = FeatureExtractor(checkpoint, mean=mean, std=std)
            check_linkable(min_confidence, images := list(extractor.reader.sources(images)))
            results, classes = classify_by_nearest(extractor, images, labelled)
    if min_confidence is not None:
        inference.write_results(path / 'classes.csv', results, classes)
        inference.link_images(path, results, min_confidence)
    elif out is not None:
        inference.write_results(path, results, classes)
    if json is not None:
        inference.write_json(Path(json).expanduser(), results)
    return results


def classify_by_nearest(
    extract: FeatureExtractor, images: Sources, labelled: str | Path
) -> tuple[list[dict[str, Any]], list[str]]:
    """Lets the most similar images of class folders vote; returns the results and the names of the classes."""
    found = find_class_folders(labelled)
    if found.question:
        raise UserError(f'--labelled: {found.question} (in finetune); expected a folder of class folders alone')
    bank = list_folder(found.train, found.left_out)
    classes = sorted({*bank.names.values()} - {''})
    known = {str(bank.root / path): classes.index(name) for path, name in bank.names.items() if name}
    features, samples = extract.means([*map(ExistingPath, known)])
    labels = torch.tensor([known[sample['path']] for sample in samples if 'error' not in sample])
    readable = len(labels.unique())
    if readable < 2:
        raise UserError(
            f'--labelled: {str(labelled)!r} has {len(classes)} class folders, {readable} of them with readable images; '
            'expected 2 or more'
        )
    queries, asked = extract.means([*extract.reader.sources(images)])
    shares = (row / row.sum() for votes in knn_votes(queries, features, labels, len(classes)) for row in votes)
    names = [*map(quoted, classes)]  # as a classifier's
    return [result if 'error' in result else describe(next(shares), names, result['path']) for result in asked], names


def segment(
    checkpoint: CheckpointInput,
    images: Sources = SCENES,
    out: str | Path = 'segmentation',
    labelled: str | Path | None = None,
    short_side: int | None = None,
    full_size: bool = False,
    reduce_zero_label: bool | None = None,
    multi_scale: bool = False,
    max_pixels: int | None = None,
    mean: PerChannel = None,
    std: PerChannel = None,
    min_confidence: float | None = None,
    confidence: bool = False,
    probabilities: bool = False,
    json: str | Path | None = None,
) -> list[dict[str, Any]]:
    """Names the class of each pixel, with a segmentor or by the most similar labelled patches.

    Args:
        checkpoint: see `classify`.
        images: files and folders, in Python also arrays (labels/image.png, image_2.png, ...) and PIL images, see
            `ImageReader.results`; by default three drawn scenes.
        out: folder for classes.txt, labels/<name>.png (indices into classes.txt from 0; a palette has the classes'
            colours, if there are at most 256), overlays/<name>.png with a legend, and confidence.csv.
        labelled: folder of images/ and annotations/, whose nearest patches decide, for a model without classes; see
            docs/label_maps.md.
        short_side: short side, in pixels, at which the model sees images; by default a segmentor keeps the scale of its
            training, in windows where images are larger, and other models take the checkpoint's size.
        full_size: let a segmentor see images pixel by pixel, in windows.
        reduce_zero_label: whether 0 marks unlabelled pixels in `labelled` or is a class; by default as classes.txt
            shows.
        multi_scale: average a segmentor's predictions over all scales and flips.
        max_pixels: limit for an image, and for a label map in `labelled`; 178,956,970 by default.
        mean, std: see `classify`.
        min_confidence: make `out` a folder that `finetune` reads: pixels whose class has less than this probability, 0
            to 1, are 255 in the label map, and images/ has links to the images that keep any label.
        confidence: write confidence/<name>.png too, the probability of each pixel's label times 255.
        probabilities: write probabilities/<name>.npz too, for each pixel the probabilities of all classes:
            `probabilities`, float16 (classes, height, width), and `classes`, their names.
        json: see `classify`.

    Maps of a GeoTIFF are .tif files on the same grid, 255 (confidence 0) where it has no data.

    Returns:
        For each image dict(path, labels=file, overlay=file, confidence=mean probability of its pixels' labels; with
        `labelled` their share in the nearest patches), with `min_confidence` also labelled=share of pixels, 0 to 1,
        with `confidence` confidence_map=file, with `probabilities` probabilities=file. Overlays of many bands show
        bands 1 to 3. For an unreadable image dict(path, error).
    """
    with quiet():
        folder = Path(out).expanduser()
        check_confidence(min_confidence)
        check_no_folder('--json', json)
        check_unused(folder)
        options: dict[str, Any] = dict(max_pixels=max_pixels, mean=mean, std=std)
        segmentor: inference.Segmentor
        if labelled is not None:
            if multi_scale or full_size:
                raise UserError('--multi-scale and --full-size are for segmentors; leave them or --labelled out')
            found = find_labelled(labelled, reduce_zero_label, max_pixels or MAX_PIXELS)
            segmentor = nearest_patches(FeatureExtractor(checkpoint, size=short_side, whole=True, **options), found)
        elif reduce_zero_label is not None:
            raise UserError('--keep-zero-label and --reduce-zero-label need --labelled FOLDER; give that too')
        elif short_side is not None and full_size:
            raise UserError('--short-side and --full-size are both given; leave one out')
        else:
            scale: dict[str, Any] = dict(multi_scale=multi_scale, short_side=short_side, full_size=full_size)
            segmentor = SegmentationInferencer(checkpoint, **scale, **options)
        segmentor.with_probabilities = probabilities
        check_linkable(min_confidence, sources := list(segmentor.reader.sources(images)))
        results = segmentor(sources, on_error='skip', return_images=True)
        if len(sources) == 1:
            segmentor.bar = lambda blocks: with_bar(blocks, len(blocks))
        else:
            results = with_bar(results, len(sources))
        written = inference.write_maps(results, segmentor, folder, min_confidence, confidence, len(sources))
    if json is not None:
        inference.write_json(Path(json).expanduser(), written)
    return written


def check_confidence(least: float | None) -> None:
    if least is not None and not 0 <= least <= 1:
        raise UserError(f'--min-confidence is {least}; expected a number from 0 to 1')


def check_linkable(least: float | None, images: Sequence[ImageInput]) -> None:
    if least is not None and not all(isinstance(image, str | Path) for image in images):
        raise UserError('min_confidence makes links to image files; give files, not arrays')


def check_unused(folder: Path) -> None:
    """Refuses a folder whose files `segment` would replace, or whose images would be learned from too."""
    of_segment = (folder / inference.CONFIDENCE).exists()  # an earlier call wrote labels/ and classes.txt, not the user
    others = 'labels', 'overlays', 'confidence', 'probabilities', 'classes.txt'
    for name in ('images',) if of_segment else ('images', *others):
        if (folder / name).exists():
            raise UserError(f'{folder / name} is there already; give another --out')


def find_labelled(folder: str | Path, reduce_zero_label: bool | None, max_pixels: int) -> LabelMaps:
    found = find_label_maps(folder, reduce_zero_label, whole=True, max_pixels=max_pixels)
    if not found:
        raise FileNotFoundError(f'--labelled: no label maps in {str(folder)!r}; {EXPECTED}')
    return found


def nearest_patches(extract: FeatureExtractor, images: LabelMaps) -> 'NearestPatches':
    with TemporaryDirectory() as lists:
        write_lists(images, Path(lists))
        return NearestPatches(extract, patch_dataset(extract, **images.dataset(Path(lists), 'train')))


class NearestPatches:
    """Segments images by frozen features, without training: a `patch_classifier` of a `patch_dataset`.

    Call it like a SegmentationInferencer; it has `with_probabilities` too.

    Args:
        method: of the `patch_classifier`; with 'knn' the confidence is the label's share in the nearest patches.
        max_patches: that others are compared with.
    """

    with_probabilities = False

    def __init__(
        self, extract: FeatureExtractor, dataset: SegmentationFolder, method: str = 'knn', max_patches: int = 50_000
    ) -> None:
        self.extract, self.reader = extract, extract.reader
        self.num_images = len(dataset)
        self.classes, self.palette = [*map(quoted, dataset.metainfo['classes'])], dataset.metainfo['palette']
        self.scores_of, _ = patch_classifier(extract, dataset, method, max_patches=max_patches)

    def __call__(
        self, images: Sources, on_error: str = 'raise', return_images: bool = False
    ) -> Iterator[dict[str, Any]]:
        return self.reader.results(images, self.predict, on_error=on_error, return_images=return_images)

    def predict(self, samples: list[dict]) -> list[dict[str, Any]]:
        (sample,) = samples
        patches = self.extract.features(sample['inputs'][None], [None])['patches'][0, 0]  # h, w, C
        scores = pixel_scores(self.scores_of(patches), sample['data_samples'].ori_shape)  # K, H, W
        result = dict(labels=scores.argmax(dim=0).byte().cpu().numpy(), confidence=scores.amax(dim=0).cpu().numpy())
        if self.with_probabilities:
            result['probabilities'] = scores.half().cpu().numpy()
        return [result]

"""Segments or classifies images with an ONNX file of `beit-mm export`: needs numpy, Pillow and onnxruntime alone.

Pixels of label maps are places in the list of classes. Results are those of `beit-mm segment` and `classify`."""

import argparse
import itertools
import json
import time
from pathlib import Path

import numpy as np
import onnxruntime
from PIL import Image, ImageOps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('model', help='ONNX file')
    parser.add_argument('images', nargs='+', type=Path, help='image files')
    parser.add_argument('--out', type=Path, default=Path('maps'), help='folder of label maps (default: maps)')
    parser.add_argument('--multi-scale', action='store_true', help='a segmentor at all scales with flip')
    args = parser.parse_args()
    model, used = Model(args.model), set()
    if args.multi_scale and 'short_sides' not in model.notes:
        parser.error(f'--multi-scale: {args.model} names no scales; export a segmentor whose config has a tta_pipeline')
    for path in args.images:
        try:
            begin, image = time.perf_counter(), read(path)
        except Exception as error:  # Pillow's decoders raise nearly everything
            print(f'{path}: unreadable: {error}')
            continue
        if 'crop_size' in model.notes:
            labels = model.segment(image, args.multi_scale)
            names = (f'{path.stem}_{number}.png' if number > 1 else f'{path.stem}.png' for number in itertools.count(1))
            used.add(name := next(name for name in names if name not in used))
            drawn = Image.fromarray(labels.astype(np.uint8 if len(model.notes['classes']) <= 256 else np.uint16))
            if drawn.mode == 'L':
                drawn.putpalette(np.array(model.notes['palette'], np.uint8).tobytes())
            args.out.mkdir(parents=True, exist_ok=True)
            drawn.save(args.out / name)
            said = f'{args.out / name} with {", ".join(model.notes["classes"][label] for label in np.unique(labels))}'
        else:
            probabilities = softmax(model.logits(prepare(image, model.notes['steps'])))
            said = f'{model.notes["classes"][probabilities.argmax()]} {probabilities.max():.3f}'
        print(f'{path}: {said}, {time.perf_counter() - begin:.2f} s')


class Model:
    def __init__(self, path: str):
        self.session = onnxruntime.InferenceSession(path)
        self.notes = json.loads(self.session.get_modelmeta().custom_metadata_map['beit_mm'])

    def logits(self, image: np.ndarray) -> np.ndarray:
        """Logits (classes,), or (classes, h, w), of an image (h, w, 3), which is padded to whole cells."""
        pixels = (image.astype(np.float32) - np.float32(self.notes['mean'])) / np.float32(self.notes['std'])
        pixels = np.pad(pixels, [(0, -side % self.notes['divisor']) for side in image.shape[:2]] + [(0, 0)])
        (logits,) = self.session.run(['logits'], {'images': pixels.transpose(2, 0, 1)[None]})
        return logits[0, :, : len(image), : len(image[0])] if logits.ndim == 4 else logits[0]

    def segment(self, image: np.ndarray, multi_scale: bool) -> np.ndarray:
        """Labels (H, W), by the logits at one scale or the mean of probabilities at all, each with its mirror image."""
        size, found = image.shape[:2], []
        if not multi_scale:
            return self.slide(prepare(image, self.notes['steps']), size).argmax(axis=0)
        for short in self.notes['short_sides']:
            view = prepare(image, [dict(type='Resize', scale=(short, short * max(size) / min(size)), backend='cv2')])
            found += [softmax(self.slide(view, size)), softmax(self.slide(view[:, ::-1], size))[:, :, ::-1]]
        return np.mean(found, axis=0).argmax(axis=0)

    def slide(self, view: np.ndarray, size: tuple[int, int]) -> np.ndarray:
        """Logits (classes, H, W) of `size`, by sliding windows over a view (h, w, 3) of an image."""
        sides = view.shape[:2]
        found, count = np.zeros((len(self.notes['classes']), *sides), np.float32), np.zeros(sides, np.float32)
        for rows, columns in itertools.product(*map(windows, sides, self.notes['crop_size'], self.notes['stride'])):
            found[:, rows, columns] += self.logits(view[rows, columns])
            count[rows, columns] += 1
        return bilinear(sides[0], size[0]) @ (found / count) @ bilinear(sides[1], size[1]).T


def read(path: Path) -> np.ndarray:
    """Pixels uint8 (H, W, 3): RGB, upright, transparency on white."""
    image = ImageOps.exif_transpose(Image.open(path))
    if image.mode[0] in 'IF':
        raise ValueError('more than 8 bits a channel')
    if 'A' in image.getbands() or 'transparency' in image.info:
        image = Image.alpha_composite(Image.new('RGBA', image.size, 'white'), image.convert('RGBA'))
    return np.asarray(image.convert('RGB'))


def prepare(image: np.ndarray, steps: list[dict]) -> np.ndarray:
    """The image (h, w, 3) after the steps of a test pipeline."""
    for step in steps:
        height, width = image.shape[:2]
        if step['type'] == 'CenterCrop':
            right, bottom = step['crop_size']
            top, left = max(0, round((height - bottom) / 2)), max(0, round((width - right) / 2))
            image = image[top : top + bottom, left : left + right]
            continue
        scale = step['scale']
        if step['type'] == 'ResizeEdge':  # the short one
            size = (int(scale * height / width), scale) if width < height else (scale, int(scale * width / height))
        else:
            ratio = min(max(scale) / max(height, width), min(scale) / min(height, width))
            size = int(height * ratio + 0.5), int(width * ratio + 0.5)
        if step['backend'] == 'pillow':
            method = Image.Resampling[step['interpolation'].upper()]
            image = np.asarray(Image.fromarray(image).resize(size[::-1], method))
        else:
            image = resize(image, size)
    return image


def resize(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """An image uint8 (h, w, 3) at another size, to the last bit as cv2.resize with INTER_LINEAR."""
    pixels, sides = image.astype(np.int64), []
    if image.shape[:2] == (2 * size[0], 2 * size[1]):
        return (sum(pixels[row::2, column::2] for row in (0, 1) for column in (0, 1)) + 2 >> 2).astype(np.uint8)
    for source, target in zip(image.shape, size, strict=False):
        place = ((np.arange(target) + 0.5) * (source / target) - 0.5).astype(np.float32)
        low = np.floor(place).astype(int)
        part = place - low.astype(np.float32)
        part[((low < 0) | (low >= source - 1)) & bool(sides)] = 0  # in a row the border is repeated
        weights = (np.rint(share * np.float32(2048)).astype(np.int64)[:, None] for share in (1 - part, part))
        sides.append((low.clip(0, source - 1), (low + 1).clip(0, source - 1), *weights))
    (top, bottom, *by_row), (left, right, *by_column) = sides
    rows = pixels[:, left] * by_column[0] + pixels[:, right] * by_column[1] >> 4
    blended = (by_row[0][..., None] * rows[top] >> 16) + (by_row[1][..., None] * rows[bottom] >> 16)
    return (blended + 2 >> 2).clip(0, 255).astype(np.uint8)


def windows(length: int, crop: int, stride: int) -> list[slice]:
    """Windows along an axis, one every `stride` pixels; the last one ends with it."""
    stops = [min(place * stride + crop, length) for place in range(max(length - crop + stride - 1, 0) // stride + 1)]
    return [slice(max(stop - crop, 0), stop) for stop in stops]


def bilinear(source: int, target: int) -> np.ndarray:
    """Bilinear resizing along an axis as a matrix float32 (target, source)."""
    place = (np.arange(target, dtype=np.float32) + np.float32(0.5)) * np.float32(source / target) - np.float32(0.5)
    return np.maximum(0, 1 - np.abs(place.clip(0, source - 1)[:, None] - np.arange(source, dtype=np.float32)))


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max(axis=0))
    return powers / powers.sum(axis=0)


if __name__ == '__main__':
    main()

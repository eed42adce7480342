"""Segments or classifies images with an ONNX file of `beit-mm export`; needs only numpy, Pillow and onnxruntime."""

import argparse
import json
from itertools import count, product
from pathlib import Path

import numpy as np
import onnxruntime
from PIL import Image, ImageOps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('model', help='ONNX file')
    parser.add_argument('images', nargs='+', type=Path, help='image files')
    parser.add_argument('--out', type=Path, help='folder for label maps (default: maps)')
    parser.add_argument('--multi-scale', action='store_true', help='segment at all scales with flip')
    args, used, failed = parser.parse_args(), set(), 0
    try:
        model = Model(args.model)
    except Exception as error:  # from onnxruntime, from JSON, or a missing key
        parser.error(f'{args.model!r}: expected an ONNX file of `beit-mm export` ({error!r:.300})')
    if model.notes.get('bands'):
        parser.error(f'{args.model!r} sees bands as its metadata `bands` say; this program reads only RGB')
    if args.multi_scale and not model.notes.get('ratios'):
        parser.error('--multi-scale: the ONNX file has no scales; export a segmentor whose config has a tta_pipeline')
    segments, out = 'crop_size' in model.notes, args.out or Path('maps')
    if args.out and not segments:
        parser.error('--out: a classifier makes no label maps; its answers are printed')
    for path in args.images:
        try:
            if segments:
                labels = model.segment(read(path), args.multi_scale)
                names = (f'{path.stem}_{number}.png' if number > 1 else f'{path.stem}.png' for number in count(1))
                used.add(name := next(name for name in names if name not in used))
                image = Image.fromarray(labels.astype(np.uint8 if len(model.notes['classes']) <= 256 else np.uint16))
                if image.mode == 'L':
                    image.putpalette(np.array(model.notes['palette'], np.uint8).tobytes())
                out.mkdir(parents=True, exist_ok=True)
                image.save(out / name)
                result = f'{out / name} with ' + ', '.join(model.notes['classes'][i] for i in np.unique(labels))
            else:
                result = describe(model.logits(prepare(read(path), model.notes['steps'])), model.notes)
        except Exception as error:  # Pillow's decoders raise nearly everything; the other images are still done
            result, failed = f'failed: {str(error) or repr(error):.300}', failed + 1
        print(repr(f'{path}: {result}')[1:-1])  # escaped, so that a name cannot control the terminal
    raise SystemExit(f'{failed} of {len(args.images)} images failed' if failed else 0)


def describe(logits: np.ndarray, notes: dict) -> str:
    """The most likely class, or each class of probability 0.5 and more where an image may have several."""
    if notes.get('multi_label'):
        pairs = zip(notes['classes'], 1 / (1 + np.exp(-logits)), strict=True)
        return ', '.join(f'{name} {share:.3f}' for name, share in pairs if share >= 0.5) or 'none'
    probabilities = softmax(logits)
    return f'{notes["classes"][probabilities.argmax()]} {probabilities.max():.3f}'


class Model:
    def __init__(self, path: str):
        self.session = onnxruntime.InferenceSession(path)
        self.notes = notes = json.loads(self.session.get_modelmeta().custom_metadata_map['beit_mm'])
        crops, strides, scales = (notes.get(name, []) for name in ('crop_size', 'stride', 'ratios'))
        usual = all(8 <= stride <= crop <= 8 * stride for crop, stride in zip(crops, strides, strict=True))
        if not usual or len(scales) > 32 or not 1 <= notes['divisor'] <= 4096:
            raise ValueError(f'{crops=}, {strides=}, {len(scales)} scales, divisor={notes["divisor"]} could take hours')

    def logits(self, image: np.ndarray) -> np.ndarray:
        """Logits (classes,) or (classes, h, w) of an image (h, w, 3), which is padded to whole cells."""
        pixels = (image.astype(np.float32) - np.float32(self.notes['mean'])) / np.float32(self.notes['std'])
        pixels = np.pad(pixels, [(0, -side % self.notes['divisor']) for side in image.shape[:2]] + [(0, 0)])
        (logits,) = self.session.run(['logits'], {'images': pixels.transpose(2, 0, 1)[None]})
        return logits[0, :, : len(image), : len(image[0])] if logits.ndim == 4 else logits[0]

    def segment(self, image: np.ndarray, multi_scale: bool) -> np.ndarray:
        """Labels (H, W): from the logits at one scale, or from mean probabilities over all scales with flip."""
        size, total = image.shape[:2], 0.0
        if not multi_scale:
            return self.slide(prepare(image, self.notes['steps']), size).argmax(axis=0)
        seen = min(seen_size(*size, self.notes['steps'][0]))
        for ratio in self.notes['ratios']:
            short = max(int(seen * ratio), *self.notes['crop_size'])
            view = prepare(image, [dict(type='Resize', scale=(short, short * max(size) / min(size)), backend='cv2')])
            total += self.probabilities(view, size) + self.probabilities(view[:, ::-1], size)[:, :, ::-1]
        return total.argmax(axis=0)

    def probabilities(self, view: np.ndarray, size: tuple[int, int]) -> np.ndarray:
        found = self.slide(view, size)
        return found if self.notes.get('probabilities') else softmax(found)  # a mask head gives no logits

    def slide(self, view: np.ndarray, size: tuple[int, int]) -> np.ndarray:
        """Logits (classes, H, W) at `size`, from sliding windows over a view (h, w, 3) of an image."""
        sides, grid = view.shape[:2], []
        for length, crop, stride in zip(sides, self.notes['crop_size'], self.notes['stride'], strict=True):
            last = max(length - crop, 0)  # start of the last window
            grid.append([slice(start, start + crop) for start in (*range(0, last, stride), last)])
        total, coverage = np.zeros((len(self.notes['classes']), *sides), np.float32), np.zeros(sides, np.float32)
        for rows, columns in product(*grid):
            total[:, rows, columns] += self.logits(view[rows, columns])
            coverage[rows, columns] += 1
        return bilinear(sides[0], size[0]) @ (total / coverage) @ bilinear(sides[1], size[1]).T


def read(path: Path) -> np.ndarray:
    """Reads pixels, uint8 (H, W, 3), RGB, upright, on white, from formats for which Pillow starts no program."""
    if path.exists() and not path.is_file():  # reading a pipe could block for ever
        raise ValueError('a folder, pipe or device; expected an image')
    image = ImageOps.exif_transpose(Image.open(path, formats=('JPEG', 'PNG', 'WEBP', 'GIF', 'BMP', 'PPM', 'TIFF')))
    if image.mode[0] in 'IF':
        raise ValueError('more than 8 bits a channel; convert it to 8 bits')
    if max(image.size) > 50 * min(image.size):  # as for beit-mm segment
        raise ValueError(f'{image.width} x {image.height} pixels; one side is more than 50 times as long as the other')
    image = Image.alpha_composite(Image.new('RGBA', image.size, 'white'), image.convert('RGBA'))
    return np.asarray(image.convert('RGB'))


def prepare(image: np.ndarray, steps: list[dict]) -> np.ndarray:
    """Applies the steps of a test pipeline to an image (h, w, 3)."""
    for step in steps:
        height, width = image.shape[:2]
        if step['type'] in ('CenterCrop', 'CenterCropDown'):
            right, bottom = step['crop_size']
            middle = round if step['type'] == 'CenterCrop' else int
            top, left = max(0, middle((height - bottom) / 2)), max(0, middle((width - right) / 2))
            image = image[top : top + bottom, left : left + right]
            continue
        size = seen_size(height, width, step)
        if not 0 < size[0] * size[1] <= 2**26:
            raise ValueError(f'{width} x {height} pixels become {size[1]} x {size[0]}; expected 1 to 67 million')
        if step['backend'] == 'pillow':
            method = Image.Resampling[step['interpolation'].upper()]
            image = np.asarray(Image.fromarray(image).resize(size[::-1], method))
        else:
            image = resize(image, size)
    return image


def seen_size(height: int, width: int, step: dict) -> tuple[int, int]:
    """Height and width of an image after a step that resizes."""
    if step['type'] == 'ResizeEdge':  # the short edge
        scale = step['scale']
        return (int(scale * height / width), scale) if width < height else (scale, int(scale * width / height))
    if not step.get('keep_ratio', True):
        return tuple(step['scale'][::-1])
    if step['type'] == 'ResizeToScale':
        ratio, factor = step['short_side'] / min(height, width), step['factor']
        if factor is not None and not 1 / step['within'] < ratio / factor < step['within']:
            ratio = factor
    else:
        long, short = max(step['scale']), min(step['scale'])
        ratio = min(long / max(height, width), short / min(height, width))
    return int(height * ratio + 0.5), int(width * ratio + 0.5)


def resize(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Resizes an image, uint8 (h, w, 3), bit for bit as cv2.resize with INTER_LINEAR."""
    sides = []
    for source, target in zip(image.shape, size, strict=False):
        position = ((np.arange(target) + 0.5) * (source / target) - 0.5).astype(np.float32)
        low = np.floor(position).astype(int)
        part = position - low.astype(np.float32)
        part[((low < 0) | (low >= source - 1)) & bool(sides)] = 0  # cv2 repeats the border only along rows
        weights = (np.rint(share * np.float32(2048)).astype(np.int64)[:, None] for share in (1 - part, part))
        sides.append((low.clip(0, source - 1), (low + 1).clip(0, source - 1), *weights))
    (top, bottom, *by_row), (left, right, *by_column) = sides
    rows = image[:, left] * by_column[0] + image[:, right] * by_column[1] >> 4
    blended = (by_row[0][..., None] * rows[top] >> 16) + (by_row[1][..., None] * rows[bottom] >> 16)
    return (blended + 2 >> 2).clip(0, 255).astype(np.uint8)


def bilinear(source: int, target: int) -> np.ndarray:
    """Bilinear resizing along an axis as a matrix float32 (target, source)."""
    position = (np.arange(target, dtype=np.float32) + np.float32(0.5)) * np.float32(source / target) - np.float32(0.5)
    return np.maximum(0, 1 - np.abs(position.clip(0, source - 1)[:, None] - np.arange(source, dtype=np.float32)))


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max(axis=0))
    return powers / powers.sum(axis=0)


if __name__ == '__main__':
    main()

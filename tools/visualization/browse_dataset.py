"""Draws training samples of a config as the model sees them.

    python tools/visualization/browse_dataset.py configs/demo/pretrain.py --out samples.png

Each sample is a row. For pretraining it shows the first view, the same with gray masked patches, the tokenizer's view,
its visual tokens (decoded if the tokenizer can, otherwise as colours), and DINO's crops. For fine-tuning it shows the
image, and the label map in colours. Crops, jitter and masks are those of the first epoch of a run with this seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from beit_mm.apis.commands import argument_parser, load_config
from beit_mm.errors import UserError
from beit_mm.terminal import quiet, run, without_output

if TYPE_CHECKING:
    from mmengine.config import Config
    from PIL import Image
    from torch import Tensor

    from beit_mm.models.tokenizers.base import Tokenizer

MASK_SHADE = 0.5  # gray in place of masked patches


def main() -> None:
    parser = argument_parser(__doc__, config_only=True)
    parser.add_argument('--number', type=int, default=8, help='number of samples (default: 8)')
    parser.add_argument('--seed', type=int, help="seed of the run (default: the config's)")
    parser.add_argument('--no-tokens', action='store_true', help='leave out tokens, which need weights')
    parser.add_argument('--channels', type=int, nargs=3, default=(0, 1, 2), help='bands to show as red, green and blue')
    parser.add_argument('--out', type=Path, default=Path('work_dirs/samples.png'), help='default: %(default)s')
    args = parser.parse_args()
    if args.number < 1:
        parser.error(f'--number is {args.number}; expected at least 1')
    with quiet():
        from mmengine.registry import init_default_scope

        from beit_mm.apis.inference import check_picture

        check_picture(args.out)
        cfg = load_config(args)
        if not cfg.get('train_dataloader'):
            raise UserError('the config has no train_dataloader; expected a config for training')
        init_default_scope(cfg.default_scope)
        seed = cfg.get('randomness', {}).get('seed') or 0 if args.seed is None else args.seed
        with without_output():
            drawn = draw_samples(cfg, args.number, seed, not args.no_tokens, args.channels)
        drawn.save(args.out)
        print(args.out)


def draw_samples(
    cfg: Config, number: int, seed: int, tokens: bool = True, channels: Sequence[int] = (0, 1, 2)
) -> Image.Image:
    """Draws a sheet of training samples, spread evenly over the dataset; the config's `default_scope` must be set."""
    import torch
    from mmengine.dataset import default_collate

    from beit_mm.datasets.image_folder import UnlabeledImages
    from beit_mm.datasets.samplers import SampleKey, seed_generators
    from beit_mm.pictures import sheet_of_columns
    from beit_mm.registry import DATASETS

    dataset, samples = DATASETS.build(cfg.train_dataloader.dataset), []
    for row in range(number := min(number, len(dataset))):
        key = SampleKey(seed, 0, row * len(dataset) // number)
        seed_generators(key)
        samples.append(dataset[key if isinstance(dataset, UnlabeledImages) else key.index])
    if isinstance(samples[0]['inputs'], dict):
        return sheet_of_columns(view_columns(cfg, default_collate(samples), tokens), channels)
    columns = dict(image=stack_padded([sample['inputs'] for sample in samples], 0) / 255)
    if 'gt_sem_seg' in samples[0]['data_samples']:
        colours = dataset.metainfo['palette']
        palette = torch.tensor([*colours, *[[255] * 3] * (256 - len(colours))]) / 255  # ignored pixels are white
        maps = stack_padded([sample['data_samples'].gt_sem_seg.data[0] for sample in samples], 255)  # B, H, W
        columns['labels'] = palette[maps.long()].permute(0, 3, 1, 2)
    return sheet_of_columns(columns, channels)


def stack_padded(images: Sequence[Tensor], value: int) -> Tensor:
    """Stacks images (..., h, w), padded below and on the right: crops of images that are smaller than a crop differ."""
    import torch
    import torch.nn.functional as F

    height, width = (max(image.shape[axis] for image in images) for axis in (-2, -1))
    pads = ((0, width - image.shape[-1], 0, height - image.shape[-2]) for image in images)
    return torch.stack([F.pad(image, pad, value=value) for image, pad in zip(images, pads, strict=True)])


def view_columns(cfg: Config, batch: dict, tokens: bool) -> dict[str, Tensor]:
    """Columns of a batch for pretraining: title -> float (B, C, H, W) in [0, 1]."""
    import torch
    import torch.nn.functional as F

    from beit_mm.models.beit import TwoViewDataPreprocessor
    from beit_mm.models.tokenizers.base import Tokenizer
    from beit_mm.registry import MODELS

    preprocessor = MODELS.build(cfg.model.data_preprocessor)
    if not isinstance(preprocessor, TwoViewDataPreprocessor):
        raise UserError(f'views of a {type(preprocessor).__name__} cannot be drawn; expected a TwoViewDataPreprocessor')
    inputs = preprocessor(batch)['inputs']
    image = preprocessor.denormalize(inputs['images'])
    columns = {'first view': image}
    if (mask := inputs['mask']) is not None:  # B, h, w
        pixels = F.interpolate(mask[:, None].float(), image.shape[2:], mode='nearest-exact') > 0
        columns['masked'] = torch.where(pixels, MASK_SHADE, image)
    if (second := inputs['tokenizer_images']) is not None:
        columns["tokenizer's view"] = second
        config = cfg.model.get('target_generator')
        if tokens and config and isinstance(tokenizer := MODELS.build(config), Tokenizer):
            with torch.no_grad():
                columns.update(token_column(tokenizer.eval(), second))
    for name in ('second_images', 'local_images'):
        if (crops := inputs.get(name)) is not None:
            parts = preprocessor.denormalize(crops).split(len(image))
            title = name.split('_')[0] + ' crop'
            columns.update({title + f' {i}' * (len(parts) > 1): part for i, part in enumerate(parts)})
    return columns


def token_column(tokenizer: Tokenizer, images: Tensor) -> dict[str, Tensor]:
    """Column of the visual tokens of images (B, C, H, W): decoded, or a colour for each token of the vocabulary."""
    import torch

    from beit_mm.datasets.segmentation_folder import distinct_colours

    ids = tokenizer.encode(images)  # B, h, w
    if tokenizer.can_decode:
        return {'tokens, decoded': tokenizer.decode(ids)}
    colours = torch.tensor(distinct_colours(tokenizer.vocab_size)) / 255
    return {'tokens as colours': colours[ids].permute(0, 3, 1, 2)}


if __name__ == '__main__':
    run(main)

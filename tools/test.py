r"""Evaluates a checkpoint on the held-out images of its config.

    python tools/test.py configs/beit/pretrain_300e.py work_dirs/pretrain_300e/epoch_300.pth
    python tools/test.py configs/beit/finetune_in1k_100e.py CHECKPOINT --tta --out predictions.json
    python tools/test.py configs/beit_plus/upernet_640_ade20k_160k.py CHECKPOINT --tta --show-dir pictures
    python tools/test.py configs/dvae/dalle_8k_in1k.py --cfg-options \
        model.checkpoint=encoder.pkl model.decoder_checkpoint=decoder.pkl

--out writes the metrics as one JSON object. Of a classifier it also holds `classes`, their names, and `predictions`:
for each image its path, label and name of the most likely class, and scores, [label, probability] of the five best.
"""

import json
from pathlib import Path
from typing import Any

from _cli import argument_parser, load_config, load_strictly, run

from beit_mm.terminal import UserError


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument(
        'checkpoint', nargs='?', help="path of the checkpoint; none where the config's model.checkpoint names one"
    )
    parser.add_argument('--out', metavar='FILE', help='also write metrics and predictions to this JSON file')
    parser.add_argument('--show-dir', metavar='FOLDER', help='also draw the predictions on the images')
    parser.add_argument(
        '--tta',
        action='store_true',
        help="test-time augmentation: the config's tta_model and "
        'tta_pipeline; without them the mean score of an image and its mirror image',
    )
    args = parser.parse_args()
    if args.out and Path(args.out).is_dir():
        parser.error(f'--out {args.out} is a folder; expected a file')
    from mmengine.dist import is_main_process
    from mmengine.registry import RUNNERS

    from beit_mm.engine import Predictions

    cfg = load_config(args)
    if cfg.get('test_dataloader') is None:
        raise UserError(f'{args.config} has no test_dataloader: what it trains has nothing to be tested on by itself')
    if not args.checkpoint and not cfg.model.get('checkpoint'):
        raise UserError('no CHECKPOINT given; name it behind the config')
    if args.amp:
        cfg.test_cfg.fp16 = True
    if args.tta:
        augment(cfg)
    if args.show_dir:
        draw(cfg, args.show_dir)
    cfg.default_hooks.pop('ema', None)  # the checkpoint's weights are the averaged ones already
    runner = RUNNERS.build(cfg)
    if args.checkpoint:
        load_strictly(runner, args.checkpoint)
    predictions = None
    if args.out and 'gt_label' in runner.test_dataloader.dataset.get_data_info(0):
        predictions = Predictions(runner.test_dataloader.dataset.metainfo['classes'])
        runner.test_evaluator.metrics.append(predictions)
    if args.out:  # a folder that cannot be made shows before the test
        Path(args.out).parent.mkdir(parents=True, exist_ok=True)
    report = runner.test()
    if args.out and is_main_process():
        if predictions is not None and predictions.predicted:
            report = dict(report, classes=predictions.classes, predictions=predictions.predicted)
        # float: mmseg's metrics are numpy's numbers
        Path(args.out).write_text(
            json.dumps(report, indent=2, default=lambda value: value.tolist()) + '\n', encoding='utf-8'
        )


def augment(cfg: Any) -> None:
    """Changes a config to test-time augmentation, as mmpretrain's test.py does."""
    dataset = cfg.test_dataloader.dataset
    if 'module' in cfg.model:
        raise UserError('this config already tests with augmentation (all scales with flip); leave --tta out')
    if ('tta_model' in cfg) != ('tta_pipeline' in cfg):
        raise UserError('the config has one of tta_model and tta_pipeline; --tta needs both or neither')
    if 'tta_model' not in cfg:
        *transforms, pack = dataset.pipeline
        if pack.type != 'PackInputs':
            raise UserError(
                f'--tta mirrors what PackInputs packs, this test pipeline ends with {pack.type}; only '
                'classifiers and segmentors have test-time augmentation'
            )
        if cfg.model.type.endswith('LinearProbe') and not isinstance(cfg.model.get('layers'), int):
            raise UserError(
                '--tta averages the scores of one classifier, this probe has one for each layer; set model.layers=...'
            )
        mirror = [dict(type='RandomFlip', prob=1.0), dict(type='RandomFlip', prob=0.0)]
        cfg.tta_model = dict(type='mmpretrain.AverageClsScoreTTA')
        cfg.tta_pipeline = [*transforms, dict(type='TestTimeAug', transforms=[mirror, [pack]])]
    cfg.model = dict(cfg.tta_model, module=cfg.model)
    dataset.pipeline = cfg.tta_pipeline


def draw(cfg: Any, folder: str) -> None:
    """Changes a config so that the libraries' own hooks draw each prediction into a folder."""
    if cfg.test_dataloader.dataset.pipeline[0].type.endswith('LoadBands'):
        raise UserError('--show-dir draws on RGB images, and these have other bands; leave it out')
    if cfg.default_scope == 'mmseg':
        cfg.default_hooks.visualization = dict(type='SegVisualizationHook', draw=True, interval=1)
        backends = [dict(type='LocalVisBackend')]
        cfg.visualizer = dict(dict(vis_backends=backends), **cfg.get('visualizer', {}))
        cfg.visualizer.update(type='SegLocalVisualizer', save_dir=folder)
    elif cfg.test_dataloader.dataset.pipeline[-1].type == 'PackInputs':
        cfg.default_hooks.visualization = dict(type='VisualizationHook', enable=True, interval=1, out_dir=folder)
        cfg.visualizer = dict(type='UniversalVisualizer', vis_backends=[dict(type='LocalVisBackend')])
    else:
        raise UserError('--show-dir draws what classifiers and segmentors predict of single images; leave --tta out')


if __name__ == '__main__':
    run(main)

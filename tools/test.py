"""Evaluates a checkpoint on the held-out images of its config.

    python tools/test.py configs/beit/pretrain_300e.py work_dirs/pretrain_300e/epoch_300.pth
    python tools/test.py configs/beit/finetune_in1k_100e.py CHECKPOINT --tta --out predictions.json
    python tools/test.py configs/beit_plus/upernet_640_ade20k_160k.py CHECKPOINT --tta

--out writes the metrics as one JSON object. Of a classifier it also holds `classes`, their names, and `predictions`:
for each image its path, label and name of the most likely class, and scores, [label, probability] of the five best.
"""
import argparse
import json
import sys
from functools import partial
from pathlib import Path

from mmengine.config import Config
from mmengine.dist import is_main_process
from mmengine.registry import RUNNERS

from beit_mm.engine.launch import argument_parser, load_config
from beit_mm.engine.metrics import Predictions


def main() -> None:
    parser = argument_parser(__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument('checkpoint', help='path of the checkpoint')
    parser.add_argument('--out', metavar='FILE', help='also write metrics and predictions to this JSON file')
    parser.add_argument('--tta', action='store_true', help="test-time augmentation: the config's tta_model and "
                        'tta_pipeline; without them the mean score of a image and its mirror image')
    args = parser.parse_args()
    if args.out and Path(args.out).is_dir():
        parser.error(f'--out {args.out} is a folder; expected a file')
    cfg = load_config(args)
    if args.tta:
        augment(cfg)
    cfg.load_from = args.checkpoint
    runner = RUNNERS.build(cfg)
    # numbers of a half-loaded model would mislead
    runner.load_checkpoint = partial(runner.load_checkpoint, strict=True)
    predictions = None
    if args.out and 'gt_label' in runner.test_dataloader.dataset.get_data_info(0):
        predictions = Predictions(runner.test_dataloader.dataset.metainfo['classes'])
        runner.test_evaluator.metrics.append(predictions)
    if args.out:  # a folder that cannot be made shows before the test
        Path(args.out).parent.mkdir(parents=True, exist_ok=True)
    report = runner.test()
    if args.out and is_main_process():
        if predictions is not None and predictions.found:
            report = dict(report, classes=predictions.classes, predictions=predictions.found)
        # float: mmseg's metrics are numpy's numbers
        Path(args.out).write_text(json.dumps(report, indent=2, default=float) + '\n', encoding='utf-8')


def augment(cfg: Config) -> None:
    """Changes a config to test-time augmentation, as mmpretrain's test.py does."""
    dataset = cfg.test_dataloader.dataset
    if 'module' in cfg.model:
        sys.exit('error: this config already tests with augmentation (all scales with flip); leave --tta out, or take '
                 'the config without _ms')
    if ('tta_model' in cfg) != ('tta_pipeline' in cfg):
        sys.exit('error: the config has one of tta_model and tta_pipeline; --tta needs both or neither')
    if 'tta_model' not in cfg:
        *transforms, pack = dataset.pipeline
        if pack.type != 'PackInputs':
            sys.exit(f'error: --tta mirrors what PackInputs packs, this test pipeline ends with {pack.type}; only '
                     'classifiers and segmentors have test-time augmentation')
        if cfg.model.type.endswith('LinearProbe') and not isinstance(cfg.model.get('layers'), int):
            sys.exit('error: --tta averages the scores of one classifier, this probe has one for each layer; '
                     'set model.layers=...')
        mirror = [dict(type='RandomFlip', prob=1.0), dict(type='RandomFlip', prob=0.0)]
        cfg.tta_model = dict(type='mmpretrain.AverageClsScoreTTA')
        cfg.tta_pipeline = [*transforms, dict(type='TestTimeAug', transforms=[mirror, [pack]])]
    cfg.model = dict(cfg.tta_model, module=cfg.model)
    dataset.pipeline = cfg.tta_pipeline


if __name__ == '__main__':
    main()

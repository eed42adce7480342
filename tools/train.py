"""Trains what a config describes: a tokenizer, a pretraining, a fine-tuning.

    python tools/train.py configs/beit/pretrain_300e.py
    tools/dist_train.sh configs/beit/pretrain_800e.py 16
"""
from mmengine.registry import RUNNERS

from beit_mm.engine.launch import argument_parser, load_config


def main() -> None:
    parser = argument_parser('Train a model.')
    parser.add_argument('--resume', nargs='?', const='auto', metavar='CHECKPOINT',
                        help='go on from a checkpoint, or from the newest of the work directory')
    parser.add_argument('--no-validate', action='store_true',
                        help='train without held-out images')
    args = parser.parse_args()
    cfg = load_config(args)
    if args.resume:
        cfg.resume = True
        cfg.load_from = None if args.resume == 'auto' else args.resume
    if args.no_validate:
        cfg.val_cfg = cfg.val_dataloader = cfg.val_evaluator = None
    RUNNERS.build(cfg).train()


if __name__ == '__main__':
    main()

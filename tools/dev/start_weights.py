"""Makes a file that a pretraining of the packaged weights begins with, by load_from=FILE.

    python tools/dev/start_weights.py larger.pth                   configs/demo/pretrain.py, larger in each MLP
    python tools/dev/start_weights.py backbone.pth --of FILE       the backbone of a run, without its head

beit_mm/weights/README.md has all commands.
"""

import argparse


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('out')
    parser.add_argument('--of', metavar='CHECKPOINT')
    args = parser.parse_args()
    import torch
    from mmengine.config import Config

    from beit_mm.apis.configs import find_config
    from beit_mm.checkpoint.checkpoint import Checkpoint
    from beit_mm.registry import MODELS

    if args.of:
        weights = {name: it for name, it in Checkpoint.open(args.of).weights.items() if name.startswith('backbone.')}
    else:
        torch.manual_seed(0)
        backbone = MODELS.build(Config.fromfile(str(find_config('demo/pretrain'))).model.backbone)
        for name, parameter in backbone.named_parameters():
            if name.endswith(('mlp.fc1.weight', 'mlp.fc2.weight')):
                torch.nn.init.xavier_uniform_(parameter)
        weights = {f'backbone.{name}': tensor for name, tensor in backbone.state_dict().items()}
    torch.save(dict(state_dict=weights), args.out)
    print(f'{args.out}: {len(weights)} tensors')


if __name__ == '__main__':
    main()

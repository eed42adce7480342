"""Times what a pretraining step is made of, each alone: attention by bias and backend, tokenizer, input, optimizer.

    python tools/dev/benchmarks/kernels.py --batch 256                                 # GPU
    python tools/dev/benchmarks/kernels.py --narrow --batch 2 --parts tokenizer        # a CPU

`attention`: forward and backward of torch's scaled_dot_product_attention at the size of BEiT-Base, by kind of bias and
by backend; a backend that refuses a bias says why. Our bias tables are padded to a multiple of 8 columns, the `odd`
one is not. `tokenizer`: DALL-E's encoder by precision and memory format, eager and compiled. `input`: copying a batch
to the device and normalising it there. `optimizer`: AdamW with clipping. The model is that of step.py.
"""

import argparse
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import step as steps
import torch
import torch.nn.functional as F
from _timing import GPU, add_line, machine, median_seconds
from mmengine.device import get_device
from mmengine.logging import MMLogger
from mmengine.registry import init_default_scope
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

HEADS, HEAD_WIDTH, TOKENS, MASKED = 12, 64, 197, 75  # of BEiT-Base at 224 pixels
BACKENDS = {
    'as chosen': None,
    'cuDNN': SDPBackend.CUDNN_ATTENTION,
    'efficient': SDPBackend.EFFICIENT_ATTENTION,
    'flash': SDPBackend.FLASH_ATTENTION,
    'written out': SDPBackend.MATH,
}
JITTER = (1.1, 0.9, 1.2, 100.0, 2, 0, 1)  # of an image, as TwoViewColorJitter draws it
failures: list[str] = []


def milliseconds(run: Callable[[], object], rounds: int) -> float:
    return 1e3 * median_seconds(run, rounds)


def part_attention(args: argparse.Namespace) -> dict[str, dict]:
    """Milliseconds by kind of bias and backend, or why a backend refuses it."""
    dtype = torch.bfloat16 if GPU else torch.float32
    heads, tokens = (2, 17) if args.narrow else (HEADS, TOKENS)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=get_device(), dtype=dtype, requires_grad=True)

    qkv = random(args.batch, tokens, 3 * heads * HEAD_WIDTH)
    padded = random(1, heads, tokens, -(-tokens // 8) * 8)
    odd = random(1, heads, tokens, tokens)
    picked = torch.randint(0, tokens, (args.batch, min(MASKED, tokens)), device=get_device())

    def attend(bias: Tensor | None, rows: Tensor | None = None) -> None:
        q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in qkv.chunk(3, dim=-1))
        if rows is not None:
            q = q.gather(2, rows[:, None, :, None].expand(-1, heads, -1, HEAD_WIDTH))
        F.scaled_dot_product_attention(q, k, v, attn_mask=bias).sum().backward()

    calls = {
        'no bias': lambda: attend(None),
        'trained': lambda: attend(padded[..., :tokens]),
        'frozen': lambda: attend(padded.detach()[..., :tokens]),
        'trained, odd': lambda: attend(odd),
        # the last block of a masked model: queries of the masked patches only
        'rows of each image': lambda: attend(padded[0][:, picked].transpose(0, 1)[..., :tokens], picked),
    }
    print(f'\nattention, forward and backward, ms\n{"":20}' + ''.join(f'{backend:>14}' for backend in BACKENDS))
    table, refusals = {}, []
    for bias, call in calls.items():
        row = {backend: time_backend(call, choice, args.rounds) for backend, choice in BACKENDS.items()}
        cells = (f'{value:.3f}' if isinstance(value, float) else 'refused' for value in row.values())
        print(f'{bias:20}' + ''.join(f'{cell:>14}' for cell in cells), flush=True)
        refusals += [f'{backend}, {bias}: {why}' for backend, why in row.items() if isinstance(why, str)]
        table[bias] = row
    print(*refusals, sep='\n')
    return table


def time_backend(call: Callable[[], None], backend: SDPBackend | None, rounds: int) -> float | str:
    with warnings.catch_warnings(record=True) as reasons:
        warnings.simplefilter('always')
        try:
            with sdpa_kernel(backend) if backend else nullcontext():
                return milliseconds(call, rounds)
        except RuntimeError as error:
            said = [str(reason.message).split(' (Triggered')[0] for reason in reasons]
            about = [line for line in said if not line.endswith('because:') and 'disabled' not in line]
            return ' '.join('; '.join(about or [str(error)]).split())[:110]


def part_tokenizer(args: argparse.Namespace) -> dict[str, float]:
    """Milliseconds of the encoder without its output layer."""
    model, _ = steps.build(steps.PRETRAIN, args)
    tokenizer, device = model.target_generator, torch.device(get_device())
    views = model.data_preprocessor(dict(inputs=steps.two_views(args.batch)), True)['inputs']['tokenizer_images']
    found = {}
    for precision in ('fp16', 'bf16') if GPU else ('fp32',):
        tokenizer.precision = precision
        tokenizer.prepare(device)
        for layout in (torch.channels_last, torch.contiguous_format):
            encoder = tokenizer.encoder.to(memory_format=layout)
            images = tokenizer.to_input(views.float()).contiguous(memory_format=layout)
            torch.compiler.reset()
            compiled = torch.compile(encoder.features, fullgraph=True, dynamic=False, backend=args.backend)
            for kind, features in dict(eager=encoder.features, compiled=compiled).items():
                name = f'{precision}, {str(layout).removeprefix("torch.")}, {kind}'
                with torch.no_grad():
                    found[name] = milliseconds(partial(features, images), args.rounds)
                print_row(name, found[name])
    return found


def part_input(args: argparse.Namespace) -> dict[str, float]:
    """Milliseconds from pinned memory to normalised images on the device, with and without colour jitter there."""
    model, _ = steps.build(steps.PRETRAIN, args)
    inputs = steps.two_views(args.batch)
    jitter = torch.tensor(JITTER).expand(args.batch, -1).contiguous()
    inputs_of = {'without jitter': inputs, 'with jitter': dict(inputs, jitter=jitter.pin_memory() if GPU else jitter)}
    found = {'megabytes': sum(tensor.nbytes for tensor in inputs.values()) / 1e6}
    for name, each in inputs_of.items():
        found[name] = milliseconds(lambda each=each: model.data_preprocessor(dict(inputs=each), True), args.rounds)
        print_row(f'{name}, {found["megabytes"]:.0f} MB', found[name])
    return found


def part_optimizer(args: argparse.Namespace) -> dict[str, float]:
    """Milliseconds of our whole optimizer step, and of AdamW's and the gradients' norm in it."""
    model, wrapper = steps.build(steps.PRETRAIN, args)
    wrapper.update_params(model(**model.data_preprocessor(dict(inputs=steps.two_views(2)), True), mode='loss')['loss'])
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.full_like(parameter, 1e-6)
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    calls = {
        'whole': wrapper.step,
        'AdamW': wrapper.optimizer.step,
        'norm': lambda: torch.nn.utils.get_total_norm(gradients),
    }
    found = {name: milliseconds(call, args.rounds) for name, call in calls.items()}
    for name, value in found.items():
        print_row(name, value)
    return found


PARTS = dict(attention=part_attention, tokenizer=part_tokenizer, input=part_input, optimizer=part_optimizer)


def print_row(name: str, value: float) -> None:
    print(f'{name:44}{value:10.3f} ms', flush=True)


def run_part(name: str, args: argparse.Namespace, on: dict[str, object]) -> None:
    """A failure of one part does not keep the others from being timed."""
    try:
        print(f'\n{name}')
        figures = PARTS[name](args)
        options = dict(batch=args.batch, narrow=args.narrow, rounds=args.rounds, **on)
        add_line(args.json, benchmark='kernels', title=name, **options, milliseconds=figures)
    except Exception as error:
        failures.append(f'{name}: {type(error).__name__}: {error}')
    if GPU:
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--parts', nargs='+', choices=PARTS, default=[*PARTS], help='default: all')
    parser.add_argument('--narrow', action='store_true', help='small models, to try the script out')
    parser.add_argument('--batch', type=int, default=256, help='images')
    parser.add_argument('--rounds', type=int, default=10)
    parser.add_argument('--threads', type=int, default=8, help='CPU threads')
    parser.add_argument('--backend', default='inductor', help='of torch.compile')
    parser.add_argument('--json', type=Path, metavar='FILE', help='add each part to it as a line of JSON')
    args = parser.parse_args()
    args.arch, args.tokenizer = steps.NARROW if args.narrow else 'base', None
    args.precision = 'bfloat16' if GPU else 'float32'
    MMLogger.get_instance('benchmark', log_level='WARNING')
    init_default_scope('mmpretrain')
    on = machine(args.threads)
    print(*(f'{name} {value}' for name, value in {**vars(args), **on}.items() if value), sep='; ')
    for name in args.parts:
        run_part(name, args, on)
    if failures:
        sys.exit('\n'.join(f'error: {failure}' for failure in failures))


if __name__ == '__main__':
    main()

"""Attention with a trained bias by cuDNN, which reduces the gradient of the bias in its backward kernel: does it pay?

    python tools/dev/gpu/cudnn_attention.py check           values and gradients beside the formula in float64
    python tools/dev/gpu/cudnn_attention.py time            forward and backward beside torch's kernel, base and large
    python tools/dev/gpu/cudnn_attention.py step pretrain --batch 256 --compile      a step with and without it

torch 2.6 to 2.13 hands cuDNN no bias that wants a gradient; cuDNN takes one of shape (1, heads, N, N), of any length
from 9.5 on. Needs the package nvidia-cudnn-frontend. The options of `step` are those of benchmarks/step.py. Without a
GPU the same operators compute the formula, which shows that they are right and compile, and nothing about speed.
It is to move into the package only if a compiled step of base gains at least 4 %.
"""

import functools
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from parts import report
from torch import Tensor

try:
    import cudnn
except ImportError:
    cudnn = None

sys.path.append(str(Path(__file__).resolve().parents[1] / 'benchmarks'))
GPU = torch.cuda.is_available()
TOKENS, HEAD_WIDTH = 197, 64
SIZES = dict(base=(256, 12), large=(128, 16))  # images, heads
MIN_CUDNN = 90500


# The operators: on a CPU the formula, on a GPU cuDNN


@torch.library.custom_op('beit_mm_dev::attention', mutates_args=())
def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Queries, keys, values (B, heads, N, d), bias (1, heads, N, N): (B, heads, N, d), log-sum-exp (B, heads, N, 1)."""
    scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5 + bias
    stats = scores.logsumexp(dim=-1, keepdim=True)
    out = empty_by_token(q).copy_((scores - stats).exp() @ v)
    return out, stats.float()


@torch.library.custom_op('beit_mm_dev::attention_backward', mutates_args=())
def attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, out: Tensor, stats: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values (B, heads, N, d) and of the bias (1, heads, N, N)."""
    scale = q.shape[-1] ** -0.5
    weights = (q @ k.transpose(-2, -1) * scale + bias - stats).exp()  # B, heads, N, N
    of_scores = weights * (grad @ v.transpose(-2, -1) - (grad * out).sum(dim=-1, keepdim=True))
    found = (of_scores @ k * scale, of_scores.transpose(-2, -1) @ q * scale, weights.transpose(-2, -1) @ grad)
    of_bias = torch.empty_strided(bias.shape, bias.stride(), dtype=bias.dtype)
    return *(empty_by_token(q).copy_(x) for x in found), of_bias.copy_(of_scores.sum(dim=0, keepdim=True))


@attention.register_kernel('cuda')
def _(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    tensors = dict(q=q, k=k, v=v, bias=bias, O=empty_by_token(q), Stats=empty_stats(q))
    execute('sdpa', tensors, outputs=('O', 'Stats'))
    return tensors['O'], tensors['Stats']


@attention_backward.register_kernel('cuda')
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, out: Tensor, stats: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    outputs = {name: empty_by_token(q) for name in ('dQ', 'dK', 'dV')}
    outputs['dBias'] = torch.empty_strided(bias.shape, bias.stride(), dtype=bias.dtype, device=bias.device)
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    execute('sdpa_backward', dict(q=q, k=k, v=v, bias=bias, o=out, dO=grad, stats=stats, **outputs), (*outputs,))
    return tuple(outputs.values())


attention.register_fake(lambda q, k, v, bias: (empty_by_token(q), empty_stats(q)))
attention_backward.register_fake(
    lambda grad, q, k, v, bias, out, stats: (
        *(empty_by_token(q) for _ in range(3)),
        torch.empty_strided(bias.shape, bias.stride(), dtype=bias.dtype, device=bias.device),
    )
)
attention.register_autograd(
    lambda ctx, grad, _: attention_backward(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, *output),
)


def empty_by_token(q: Tensor) -> Tensor:
    """(B, heads, N, d), in memory (B, N, heads, d), so that the projection after it copies nothing."""
    batch, heads, tokens, width = q.shape
    return q.new_empty(batch, tokens, heads, width).transpose(1, 2)


def empty_stats(q: Tensor) -> Tensor:
    return q.new_empty(*q.shape[:3], 1, dtype=torch.float32)


def execute(operation: str, tensors: dict[str, Tensor], outputs: tuple[str, ...]) -> None:
    """Runs cuDNN's graph of the operation, which is built once for each kind of input, on the current stream."""
    kinds = tuple((name, tuple(x.shape), x.stride(), x.dtype) for name, x in tensors.items())
    graph, handles = built(operation, kinds, outputs, torch.cuda.current_device())
    workspace = torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device='cuda')
    cudnn.set_stream(handle_of(torch.cuda.current_device()), torch.cuda.current_stream().cuda_stream)
    pack = {handles[name]: x for name, x in tensors.items()}
    graph.execute(pack, workspace, handle=handle_of(torch.cuda.current_device()))


@functools.cache
def built(operation: str, kinds: tuple, outputs: tuple[str, ...], device: int) -> tuple[Any, dict[str, Any]]:
    graph, handles = described(operation, kinds, outputs, handle_of(device))
    graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    return graph, handles


@functools.cache
def handle_of(device: int) -> Any:
    return cudnn.create_handle()


def described(operation: str, kinds: tuple, outputs: tuple[str, ...], handle: Any = None) -> tuple[Any, dict[str, Any]]:
    """The graph and its tensors by name; validated, which needs no GPU."""
    types = {
        torch.bfloat16: cudnn.data_type.BFLOAT16,
        torch.float16: cudnn.data_type.HALF,
        torch.float32: cudnn.data_type.FLOAT,
    }
    accumulated = dict(intermediate_data_type=cudnn.data_type.FLOAT, compute_data_type=cudnn.data_type.FLOAT)
    graph = cudnn.pygraph(io_data_type=types[kinds[0][3]], handle=handle, **accumulated)
    handles = {
        name: graph.tensor(name=name, dim=shape, stride=stride, data_type=types[dtype])
        for name, shape, stride, dtype in kinds
        if name not in outputs or name == 'dBias'  # the caller's tensor, all other outputs are the graph's
    }
    width = kinds[0][1][-1]
    options = dict(generate_stats=True) if operation == 'sdpa' else {}
    results = getattr(graph, operation)(name=operation, attn_scale=width**-0.5, **handles, **options)
    handles |= dict(zip((name for name in outputs if name != 'dBias'), results, strict=True))
    for name, shape, stride, dtype in kinds:
        if name in outputs:
            handles[name].set_output(True).set_dim(shape).set_stride(stride).set_data_type(types[dtype])
    graph.validate()
    return graph, handles


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    """In place of the attention of models/vit.py: by cuDNN where all images learn the bias (1, heads, N, N)."""
    if bias is None or not bias.requires_grad or bias.shape[0] > 1 or q.shape[2] != k.shape[2]:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    return attention(q, k, v, bias)[0]


# Measuring


def inputs_of(size: str, dtype: torch.dtype) -> list[Tensor]:
    """What a block hands over: parts of one product (B, N, 3C), and a bias whose rows are padded to a multiple of 8."""
    images, heads = SIZES[size] if GPU else (2, 2)
    options = dict(dtype=dtype, device='cuda' if GPU else 'cpu')
    mixed = torch.randn(images, TOKENS, 3 * heads * HEAD_WIDTH, **options)
    parts = [part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in mixed.chunk(3, dim=-1)]
    bias = torch.randn(1, heads, TOKENS, -(-TOKENS // 8) * 8, **options)[..., :TOKENS]
    return [x.detach().requires_grad_() for x in (*parts, bias)]


def formula(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5 + bias).softmax(dim=-1) @ v


def check() -> None:
    """Relative errors (root mean square) of the result and of four gradients, for this and for torch's kernel."""
    for dtype in (torch.bfloat16, torch.float16) if GPU else (torch.float32,):
        inputs = inputs_of('base', dtype)
        grad = torch.randn_like(inputs[0])
        exact = [x.detach().double().requires_grad_() for x in inputs]
        expected = formula(*exact)
        truth = [expected, *torch.autograd.grad(expected, exact, grad.double())]
        for name, call in dict(cudnn=attend, torch=F.scaled_dot_product_attention).items():
            out = call(*inputs)
            found = [out, *torch.autograd.grad(out, inputs, grad)]
            errors = [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, truth, strict=True)]
            figures = dict(zip(('out', 'q', 'k', 'v', 'bias'), errors, strict=True))
            report(f'errors of {name}, {dtype}', **figures)
            if name == 'cudnn' and max(errors) > (0.02 if GPU else 1e-5):
                sys.exit('error: these are not the values and gradients of the formula')


def time() -> None:
    from _timing import median_seconds

    rounds = 20 if GPU else 1
    for size in SIZES:
        inputs = inputs_of(size, torch.bfloat16 if GPU else torch.float32)
        grad = torch.randn_like(inputs[0])
        for name, call in dict(cudnn=attend, torch=F.scaled_dot_product_attention).items():
            forward = median_seconds(functools.partial(call, *inputs), rounds)
            out = call(*inputs)
            differentiate = functools.partial(torch.autograd.grad, out, inputs, grad, retain_graph=True)
            backward = median_seconds(differentiate, rounds)
            report(f'attention of {size}, {name}', forward_ms=1e3 * forward, backward_ms=1e3 * backward)


def step(*words: str) -> None:
    """The same model in the same process, first with torch's kernels; each has its own table."""
    import step as benchmark

    from beit_mm.models import vit

    for name, function in dict(torch=vit._attend, cudnn=attend).items():
        vit._attend = function
        report('attention of the table below', kernels=name)
        sys.argv = ['step.py', *words, '--only', 'beit_mm']
        benchmark.main()


if __name__ == '__main__':
    if GPU and (cudnn is None or cudnn.backend_version() < MIN_CUDNN):
        sys.exit('error: this needs the package nvidia-cudnn-frontend and cuDNN 9.5 or later')
    dict(check=check, time=time, step=step)[sys.argv[1]](*sys.argv[2:])
